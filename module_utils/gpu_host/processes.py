"""Which processes are a server of ours, and why: the decision that everything else in a reset rests on.

Pure over a snapshot: nothing here sends a signal. The rules, in the order in which they are asked:

1. *untouchable*: pid 1, kernel threads, we ourselves and our ancestors, sshd's own processes. Never named again.
2. *protected*: the executable's name is on the protected list.
3. *server*: the command line starts a server (module or console script as argv), or the process descends from one,
   or its parent is gone and a live server leads its session or group, or it carries the run id of a live server.
4. *orphan*: a worker of a server whose main is gone. A title says so; for a spawned child, a resource tracker, an
   inductor worker, a compiler or a renamed worker only the run id in its environment, or (but for the last two) the
   server's kernel libraries in its memory. Descendants of an orphan are orphans.
5. *stranger*: a worker whose living parent is no server, a process in doubt, or one that NVML lists on a GPU.

Everything else is a bystander and does not appear. A word in an argument, a path, a user, a virtual environment or a
shared session never makes a process ours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Callable, Protocol

from .command_line import file_name, is_interpreter, program
from .procfs import Process

SERVER_MODULES = ("sglang.launch_server", "vllm.entrypoints.openai.api_server")
SERVER_COMMANDS = ("sglang serve", "vllm serve")
SERVER_TITLES = ("sglang::*", "VLLM::*")
PROTECTED = (
    "nvidia-persistenced",
    "nv-hostengine",
    "nv-fabricmanager",
    "dcgm-exporter",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia_gpu_exporter",
    "node_exporter",
    "prometheus",
    "telegraf",
    "Xorg",
    "Xwayland",
    "gnome-shell",
)
# Processes that adopt orphans without being pid 1 (PR_SET_CHILD_SUBREAPER shows nowhere in /proc).
SUBREAPERS = (
    "systemd",
    "init",
    "tini",
    "dumb-init",
    "docker-init",
    "catatonit",
    "s6-svscan",
    "conmon",
    "containerd-shim",
    "containerd-shim-runc-v2",
)
SSHD = ("sshd", "sshd-session", "sshd-auth")
COMPILERS = ("ninja", "nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "nvlink")
# By those names also unrelated builds run: a run id in the environment has to say whose they are.
HOST_COMPILER = re.compile(r"(?:[\w.-]+-)?(?:cc|gcc|c\+\+|g\+\+|clang|clang\+\+)(?:-[\d.]+)?|cc1|cc1plus|collect2")
RUN_ID = "SGLANG_RUN_ID"  # set by the main process for its children (sglang 0.5.17 and 0.5.23, engine.py)
# The compiled extensions themselves: a folder of that name somewhere in a path proves nothing.
KERNEL_LIBRARY = re.compile(r"/(?:sgl_kernel/(?:sm\d+/)?(?:common|flash|spatial)_ops|vllm/_C)[^/]*\.so$")


class Evidence(Protocol):
    """What is looked up only for a process in question; see ``procfs.Proc``."""

    def environ(self, pid: int) -> dict[str, str] | None: ...

    def maps(self, pid: int) -> tuple[str, ...] | None: ...

    def open_files(self, pid: int) -> tuple[str, ...] | None: ...


@dataclass(frozen=True)
class Patterns:
    """What counts as a server, and what is never touched. ``protected`` matches the executable's file name."""

    modules: tuple[str, ...] = SERVER_MODULES
    commands: tuple[str, ...] = SERVER_COMMANDS
    titles: tuple[str, ...] = SERVER_TITLES
    protected: tuple[str, ...] = PROTECTED

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Patterns:
        """From a module's parameters; ``protected`` comes on top of what always is."""
        modules, commands, titles = (tuple(params[f"server_{name}"]) for name in ("modules", "commands", "titles"))
        return cls(modules, commands, titles, PROTECTED + tuple(params.get("protected", ())))

    def problems(self) -> list[str]:
        """One sentence for each pattern that could match processes that are no server."""
        found = []
        for module in self.modules:
            if not re.match(r"^[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+$", module):
                found.append(
                    f"server_modules: {module!r} would match unrelated processes; expected a dotted module name"
                    " such as 'sglang.launch_server'."
                )
        for command in self.commands:
            if not re.match(r"^[A-Za-z][\w-]+ [a-z][\w-]+$", command) or is_interpreter(command.split()[0]):
                found.append(
                    f"server_commands: {command!r} would match unrelated processes; expected a console script and"
                    " its subcommand such as 'sglang serve'."
                )
        for title in self.titles:
            if not re.match(r"^[A-Za-z]\w{2,}::\*$", title):
                found.append(
                    f"server_titles: {title!r} would match unrelated processes; expected a process title prefix"
                    " such as 'sglang::*'."
                )
        return found


@dataclass(frozen=True)
class Finding:
    """One process that matters, and why.

    ``kind`` is server, orphan, protected or stranger; ``group`` names the server it belongs to (empty where it
    belongs to none), ``main`` marks a server's main process, ``doubtful`` a process that could not be judged.
    """

    process: Process
    kind: str
    why: str
    group: str = ""
    main: bool = False
    doubtful: bool = False

    @property
    def ours(self) -> bool:
        return self.kind in ("server", "orphan")


def server_command(argv: tuple[str, ...], patterns: Patterns) -> str:
    """The pattern by which a command line starts a server, or an empty string."""
    run = program(argv)
    if run.module in patterns.modules:
        return f"-m {run.module}"
    for module in patterns.modules:
        path = module.replace(".", "/") + ".py"
        if run.script == path or run.script.endswith("/" + path):
            return path
    first = run.arguments[0] if run.arguments else ""
    for command in patterns.commands:
        script, subcommand = command.split()
        if first == subcommand and (
            file_name(run.script) == script or run.module.partition(".")[0] == script
        ):
            return command
    return ""


def worker_title(process: Process, patterns: Patterns) -> str:
    """The title pattern that a process wears, or an empty string. Only an interpreter renames itself like that."""
    if len(process.argv) != 1 or not (process.exe == "" or is_interpreter(process.exe_name)):
        return ""
    for title in patterns.titles:
        if process.title.startswith(title[:-1]):
            return title
    return ""


def helper(process: Process) -> str:
    """What kind of nameless helper a process may be to some parent, or an empty string."""
    run = program(process.argv)
    if "from multiprocessing.spawn import spawn_main" in run.code:
        return "multiprocessing.spawn child"
    if "from multiprocessing.resource_tracker import main" in run.code:
        return "multiprocessing resource tracker"
    if "from multiprocessing.forkserver import main" in run.code:
        return "multiprocessing fork server"
    if run.script.endswith("torch/_inductor/compile_worker/__main__.py"):
        return "torch inductor worker"
    if process.exe_name in COMPILERS or (run.script and file_name(run.script) in COMPILERS):
        return "compiler"
    if HOST_COMPILER.fullmatch(process.exe_name):
        return "compiler"
    if len(process.argv) == 1 and is_interpreter(process.exe_name) and not is_interpreter(process.title):
        return "renamed worker"
    return ""


def untouchable(processes: Mapping[int, Process], own_pid: int) -> frozenset[int]:
    """Pids that no rule may ever choose: pid 1, kernel threads, ourselves and our ancestors, sshd's own processes."""
    pids = {1}
    pid = own_pid
    while pid in processes and pid not in pids:
        pids.add(pid)
        pid = processes[pid].ppid
    for process in processes.values():
        if process.kernel_thread or process.exe_name in SSHD:
            pids.add(process.pid)
    return frozenset(pids)


def is_protected(process: Process, patterns: Patterns) -> bool:
    """Whether the executable, or the script that an interpreter runs, is on the protected list."""
    if process.exe_name in patterns.protected:
        return True
    if process.exe and not is_interpreter(process.exe_name):
        return False
    return file_name(program(process.argv).script) in patterns.protected


def reparented(process: Process, processes: Mapping[int, Process]) -> bool:
    """Whether the process lost its parent: it hangs under pid 1, a container's first process or a subreaper.

    A first process that is itself a Python program may be the true parent, and counts as one.
    """
    parent = processes.get(process.ppid)
    if parent is None or parent.gone:
        return True
    if is_interpreter(parent.exe_name):
        return False
    return parent.pid == 1 or parent.namespaced_pid == 1 or parent.exe_name in SUBREAPERS


def classify(
    processes: Mapping[int, Process],
    evidence: Evidence,
    patterns: Patterns,
    own_pid: int,
    visible: Callable[[Process], bool] = lambda process: True,
    gpu_holders: Iterable[int] = (),
    device_folder: str = "/dev",
) -> dict[int, Finding]:
    """Name every process that matters to a reset, by pid. ``gpu_holders`` are the pids that NVML lists."""
    never = untouchable(processes, own_pid)
    holders = frozenset(gpu_holders)
    findings: dict[int, Finding] = {}
    candidates: dict[int, Process] = {}
    for process in processes.values():
        if process.pid in never or process.gone:
            continue
        seen = visible(process)
        if is_protected(process, patterns):
            if seen or process.pid in holders:
                findings[process.pid] = Finding(process, "protected", f"{process.exe_name} is on the protected list")
        elif seen:
            candidates[process.pid] = process

    mains = {pid: command for pid, process in candidates.items() if (command := server_command(process.argv, patterns))}
    members: dict[int, list[Process]] = {}
    for process in candidates.values():
        heads = [ancestor.pid for ancestor in _line_of_descent(process, processes, candidates) if ancestor.pid in mains]
        if heads:
            members.setdefault(heads[-1], []).append(process)
    servers = {main: _group(main, processes, evidence) for main, processes in members.items()}
    for main, group in servers.items():
        for process in members[main]:
            starts = mains.get(process.pid)
            why = f"starts a server ({starts})" if starts else f"descends from server {main}"
            findings[process.pid] = Finding(process, "server", why, group, main=process.pid == main)

    for pid, process in candidates.items():
        if pid not in findings:
            finding = _by_own_marks(process, processes, servers, evidence, patterns, device_folder)
            if finding is not None:
                findings[pid] = finding

    for pid, process in candidates.items():
        if pid in findings and findings[pid].kind != "stranger":
            continue
        for ancestor in _line_of_descent(process, processes, candidates)[1:]:
            above = findings.get(ancestor.pid)
            if above is not None and above.ours:
                findings[pid] = Finding(process, above.kind, f"descends from {above.kind} {ancestor.pid}", above.group)
                break

    for pid in sorted(holders):
        holder = processes.get(pid)
        if holder is not None and pid not in findings and not holder.gone:
            why = "uses a GPU and is no server of ours"
            findings[pid] = Finding(holder, "stranger", why if visible(holder) else why + ", outside the given scope")
    return findings


def _line_of_descent(
    process: Process, processes: Mapping[int, Process], candidates: Mapping[int, Process]
) -> list[Process]:
    """The process and its ancestors, as far up as they may be judged: a protected ancestor ends the line."""
    line = [process]
    seen = {process.pid}
    while True:
        parent = processes.get(line[-1].ppid)
        if parent is None or parent.pid in seen or parent.pid not in candidates:
            return line
        line.append(parent)
        seen.add(parent.pid)


def _group(main: int, members: Iterable[Process], evidence: Evidence) -> str:
    """The name of a server: its run id, which the main sets for its children only, else the main's pid."""
    for process in members:
        run_id = (evidence.environ(process.pid) or {}).get(RUN_ID, "") if process.pid != main else ""
        if run_id:
            return run_id
    return f"server-{main}"


def _by_own_marks(
    process: Process,
    processes: Mapping[int, Process],
    servers: Mapping[int, str],
    evidence: Evidence,
    patterns: Patterns,
    device_folder: str,
) -> Finding | None:
    """Judge a process that does not descend from a living server by its title, run id, session and libraries."""
    title = worker_title(process, patterns)
    kind = "" if title else helper(process)
    if not title and not kind:
        return None
    top = process
    while not reparented(top, processes):
        top = processes[top.ppid]
        if not title:
            return None  # a helper belongs to its living parent
        if not worker_title(top, patterns):
            # Descent decides later, should that parent turn out to be ours.
            parent = f"{top.name} ({top.pid})"
            return Finding(process, "stranger", f"titled {process.title} but a child of {parent}, which is no server")

    environment = evidence.environ(process.pid)
    run_id = (environment or {}).get(RUN_ID, "")
    for main, group in servers.items():
        if run_id == group:
            return Finding(process, "server", f"carries the run id of server {main}", group)
    for leader, bond in ((process.session, "session"), (process.group, "process group")):
        if leader in servers:
            return Finding(process, "server", f"is in the {bond} that server {leader} leads", servers[leader])
    own_group = run_id or f"orphan-{process.pid}"
    if title:
        return Finding(process, "orphan", f"titled {process.title} and its main is gone", own_group)
    if run_id:
        return Finding(process, "orphan", f"{kind} with the run id of a server whose main is gone", own_group)
    if kind not in ("compiler", "renamed worker") and any(
        KERNEL_LIBRARY.search(path) for path in evidence.maps(process.pid) or ()
    ):
        return Finding(process, "orphan", f"{kind} with the server's kernel libraries, its main is gone", own_group)
    # Many daemons rename themselves and so blank their environment: only one that uses the driver is in question.
    uses_driver = any(path.startswith(f"{device_folder}/nvidia") for path in evidence.open_files(process.pid) or ())
    if environment is None and (kind.startswith("multiprocessing") or uses_driver):
        why = f"{kind} whose parent is gone and whose environment cannot be read: it may be a server's orphan"
        return Finding(process, "stranger", why, doubtful=True)
    return None


def servers_on_gpus(
    findings: Mapping[int, Finding],
    listed: Mapping[int, frozenset[str]],
    selected: frozenset[str],
) -> tuple[frozenset[str], frozenset[str]]:
    """Groups that NVML lists on a selected GPU, and groups that it lists on no GPU at all.

    ``listed`` maps a pid to the UUIDs of the GPUs on which NVML lists it. An open device node says nothing here:
    every CUDA process opens every node.
    """
    chosen, anywhere = set(), set()
    for pid, finding in findings.items():
        if finding.ours:
            gpus = listed.get(pid, frozenset())
            if gpus:
                anywhere.add(finding.group)
            if gpus & selected:
                chosen.add(finding.group)
    every = {finding.group for finding in findings.values() if finding.ours}
    return frozenset(chosen), frozenset(every - anywhere)
