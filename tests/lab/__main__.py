"""`python -m tests.lab`: start, enter and remove lab hosts by hand, and for Molecule."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from tests.lab import image
from tests.lab.command import LabError
from tests.lab.image import REPOSITORY, LabUnavailableError
from tests.lab.lab import Lab, all_labs, sweep


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
    for host in [lab.start_host(name, wait=False) for name in names if name not in there]:
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
    failed = [scenario for scenario in chosen if _run_scenario(scenario, options.keep) != 0]
    if failed:
        print(f"Failed: {', '.join(failed)}. Look at the hosts with: molecule/run {failed[0]} --keep", file=sys.stderr)
    return int(bool(failed))


def _run_scenario(scenario: str, keep: bool) -> int:
    """Run `molecule test` inside the network of a fresh lab; returns its status."""
    name = f"molecule-{scenario.replace('_', '-')}-{os.getpid()}"
    lab = Lab.create(name, owner=None if keep else os.getpid())
    try:
        environment = os.environ | lab.ansible_environment()
        del environment["ANSIBLE_CONFIG"]  # Molecule writes its own
        environment |= {
            "LAB_NAME": name,
            "LAB_INVENTORY": str(lab.write_inventory()),
            "GPU_ARTIFACTS": str(lab.folder / "artifacts"),
            "MOLECULE_COMMAND_BORDERS": "false",
        }
        lab.check_no_way_out()
        command = ["molecule", "test", "--scenario-name", scenario, *(["--destroy=never"] if keep else [])]
        return subprocess.call(lab.enter(command), env=environment, cwd=REPOSITORY)
    finally:
        if keep:
            print(f"The lab stays: python -m tests.lab --name {name} ssh gpu-1 (or down)", file=sys.stderr)
        else:
            lab.down()


if __name__ == "__main__":
    sys.exit(main())
