"""`python -m tests.lab`: start, enter and remove lab hosts by hand, and for Molecule."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

from tests.lab import control_node, image
from tests.lab.command import LabError
from tests.lab.image import REPOSITORY, LabUnavailableError
from tests.lab.lab import Lab, all_labs, sweep

_TELLS_WHY = re.compile(r"fatal:|FAILED|UNREACHABLE|CRITICAL|ERROR|\bError\b|^E  |assert|msg:")
_LINES_OF_WHY = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 1 for a failure, 3 where the lab can't run on this machine."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except LabUnavailableError as error:
        print(error, file=sys.stderr)
        return 3
    except LabError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    parser.add_argument("--name", default=os.environ.get("LAB_NAME") or "lab", help="which lab (default: %(default)s)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: object, text: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=run)
        return command

    add("check", lambda options: image.require(*image.PROGRAMS), "say what is missing on this machine")
    add("image", lambda options: print(image.build()), "build the image of the hosts, if the recipe changed")
    up = add("up", _up, "start N hosts, gpu-1 and so on, or hosts by name")
    up.add_argument("hosts", nargs="+", metavar="N|HOST")
    up.add_argument("--control-nodes", action="store_true", help="with this checkout and its Python on them")
    down = add("down", _down, "remove hosts, or the whole lab")
    down.add_argument("hosts", nargs="*", metavar="HOST")
    add("status", _status, "show the labs of this checkout and their hosts")
    add("sweep", lambda options: print(*sweep()), "remove the labs of runs that died")
    add("inventory", lambda options: print(json.dumps(Lab.open(options.name).inventory(), indent=1)), "print it")
    ssh = add("ssh", _ssh, "open a session on a host, or run a command there")
    ssh.add_argument("host")
    ssh.add_argument("command", nargs=argparse.REMAINDER)
    enter = add("enter", _enter, "run a command inside the lab's network")
    enter.add_argument("command", nargs=argparse.REMAINDER)
    molecule = add("molecule", _molecule, "run Molecule scenarios, each in a lab of its own")
    molecule.add_argument("scenario", nargs="?", default="all")
    molecule.add_argument("--keep", action="store_true", help="leave the hosts there, to look at them")
    return parser


def _up(options: argparse.Namespace) -> None:
    lab = Lab.open(options.name) if (Lab(options.name).folder / "lab.json").is_file() else Lab.create(options.name)
    names = options.hosts
    if len(names) == 1 and names[0].isdigit():
        names = [f"gpu-{count}" for count in range(1, int(names[0]) + 1)]
    there = set(lab.host_names())
    mounts = control_node.mounts() if options.control_nodes else {}
    for host in [lab.start_host(name, wait=False, mounts=mounts) for name in names if name not in there]:
        host.wait_until_up()
    lab.write_inventory()
    _status(options)


def _down(options: argparse.Namespace) -> None:
    if options.hosts:
        lab = Lab.open(options.name)
        there = lab.host_names()
        lab.stop_hosts(name for name in options.hosts if name in there)
    else:
        Lab(options.name).down()


def _status(options: argparse.Namespace) -> None:
    for lab in all_labs():
        print(f"{lab.name}{' (abandoned)' if lab.abandoned() else ''}")
        for host in lab.hosts():
            print(f"  {host.name}  {host.address}  {len(host.processes())} processes")


def _ssh(options: argparse.Namespace) -> int:
    command = " ".join(options.command)
    host = Lab.open(options.name).host(options.host)
    return subprocess.call(host.ssh_command(command or "exec bash -l", tty=not command))


def _enter(options: argparse.Namespace) -> int:
    lab = Lab.open(options.name)
    lab.check_no_way_out()
    return subprocess.call(lab.enter(options.command), env=os.environ | lab.ansible_environment())


def _molecule(options: argparse.Namespace) -> int:
    scenarios = sorted(path.parent.name for path in (REPOSITORY / "molecule").glob("*/molecule.yml"))
    if options.scenario != "all" and options.scenario not in scenarios:
        raise LabError(f"There is no scenario {options.scenario}; there are: {', '.join(scenarios)}")
    sweep()
    chosen = scenarios if options.scenario == "all" else [options.scenario]
    attempts = 1 if options.keep or "CI" not in os.environ else 2  # as the tests beside it: `make test` in CI
    failed = []
    for scenario in chosen:
        why: list[str] = []
        for attempt in range(attempts):
            why = _run_scenario(scenario, options.keep)
            if not why:
                break
            print(f"{scenario} failed{', and is run once more' if attempt + 1 < attempts else ''}:", *why, sep="\n  ")
        if why:
            failed.append(scenario)
    if failed:
        print(f"Failed: {', '.join(failed)}. Look at the hosts with: molecule/run {failed[0]} --keep", file=sys.stderr)
    return int(bool(failed))


def _run_scenario(scenario: str, keep: bool) -> list[str]:
    """Run `molecule test` inside the network of a fresh lab; returns the lines that say why it failed, none if not."""
    name = f"molecule-{scenario.replace('_', '-')}-{os.getpid()}"
    lab = Lab.create(name, owner=None if keep else os.getpid())
    try:
        environment = os.environ | lab.ansible_environment()
        del environment["ANSIBLE_CONFIG"]  # Molecule writes its own
        environment |= {
            "LAB_NAME": name,
            "LAB_INVENTORY": str(lab.write_inventory()),
            "LAB_CONTROL_PATHS": str(lab.control_paths),
            "GPU_ARTIFACTS": str(lab.folder / "artifacts"),
            "MOLECULE_COMMAND_BORDERS": "false",
        }
        lab.check_no_way_out()
        command = ["molecule", "test", "--scenario-name", scenario, *(["--destroy=never"] if keep else [])]
        status, lines = _shown(lab.enter(command), environment)
        if status == 0:
            return []
        telling = [line for line in lines if _TELLS_WHY.search(line)]
        return telling[:_LINES_OF_WHY] or lines[-_LINES_OF_WHY:] or [f"molecule ended with {status}"]
    finally:
        if keep:
            print(f"The lab stays: python -m tests.lab --name {name} ssh gpu-1 (or down)", file=sys.stderr)
        else:
            lab.down()


def _shown(command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Run a command whose output is shown as it comes; its status and the lines of it.

    A thread reads: an ssh master that the command leaves behind keeps the pipe open.
    """
    process = subprocess.Popen(
        command, env=environment, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    lines: list[str] = []

    def read() -> None:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            lines.append(line.rstrip())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    status = process.wait()
    reader.join(timeout=2)
    return status, list(lines)


if __name__ == "__main__":
    sys.exit(main())
