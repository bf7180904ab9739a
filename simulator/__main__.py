"""``python -m simulator start|stop|status|restart-scenario``: the simulated GPU host of the demo."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from simulator.build import BuildError
from simulator.host import HostError, SimulatedHost
from simulator.scenarios import SCENARIOS, start

DEFAULT_FOLDER = Path(__file__).resolve().parent.parent / ".simulated-host"
NOT_RUNNING = 3


def main(arguments: list[str]) -> int:
    """Exit status 0; 1 with a sentence on what went wrong; 3 where `status` finds nothing running."""
    parser = argparse.ArgumentParser(prog="python -m simulator", description="A simulated GPU host in a folder.")
    parser.add_argument("action", choices=["start", "stop", "status", "restart-scenario"])
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="default: %(default)s")
    parser.add_argument("--scenario", choices=list(SCENARIOS), default="hung", help="default: %(default)s")
    options = parser.parse_args(arguments)
    host = SimulatedHost(options.folder)
    try:
        if options.action == "status":
            return _status(host)
        if options.action == "stop":
            print(f"Ended {len(host.switch_off())} processes of the simulated host in {host.folder}.")
            return 0
        began = time.monotonic()
        scenario = options.scenario if options.action == "start" else host.scenario or options.scenario
        what = start(host, scenario)
        print(f"The simulated host in {host.folder} stands after {time.monotonic() - began:.1f} s: {what}.")
    except (HostError, BuildError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _status(host: SimulatedHost) -> int:
    scenario = host.scenario
    found = host.processes()
    print(f"Simulated host in {host.folder}, scenario {scenario or 'none'}: {len(found)} processes.")
    for gpu in host.gpus.gpus() if found else []:
        holders = ", ".join(str(pid) for pid in host.gpus.owners(gpu.index)) or "nobody"
        used = sum(host.gpus.owners(gpu.index).values())
        print(f"  GPU {gpu.index} (/dev/nvidia{gpu.minor}): {used} of {gpu.total_mib} MiB, held by {holders}")
    for pid, line in sorted(found.items()):
        print(f"  {pid:>8}  {line[:100]}")
    return 0 if found else NOT_RUNNING


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
