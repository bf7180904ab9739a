"""What a hung server looked like, kept before anything of it is touched.

`<state folder>/evidence/<run id>/` holds one file a part: processes, stacks, log tail, GPU readings, kernel messages.
Each part is gathered by a thread of its own in a child process and fails alone; what is not there at the deadline is
left behind, for reading /proc of a process that hangs in the kernel, or a log on a dead NFS server, can hang as well.
A reset never waits for evidence longer than that. Nothing is kept unmasked.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import stat
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, Callable

from . import masking
from .child import Child, Gone, Silent, run_command
from .deadline import Deadline
from .procfs import Proc, Process
from .storage import StorageError, private_folder, safe_name, write_all

KEEP_RUNS = 20
LOG_LINES = 200
LOG_BYTES = 256 << 10
LOG_FILES = 4
LINE_CHARACTERS = 20_000
STACKS_OF = 16
AT_ONCE = 4
THREADS_OF_ONE = 64
DUMP_SECONDS = 2.0
# What the child keeps back to write and report what it has, so that it is not killed in the middle of it.
RESERVE_SECONDS = 0.4
WRITE_SECONDS = 0.1
_ENVIRONMENT = (
    "CUDA_",
    "NCCL_",
    "SGLANG_",
    "SGL_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "FLASHINFER_",
    "VLLM_",
    "NVIDIA_",
    "OMP_",
    "HF_",
    "EAGLE",
    "PYTHON",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "VIRTUAL_ENV",
    "SPT_",
)
# Titles whose stacks explain a hang, first the most telling.
_TELLING = ("launch_server", "sglang serve", "vllm", "scheduler", "::", "detokenizer")

Part = Callable[[Deadline], str]


def collect(
    state_folder: str,
    run_id: str,
    proc: Proc,
    processes: Sequence[Process],
    readings: Any = None,
    kernel_log: Any = None,
    deadline: Deadline | None = None,
    py_spy: str | None = None,
) -> str:
    """Keep the evidence about these processes and return its folder, '' when none could be made.

    `readings` and `kernel_log` are what the caller has read already (dataclasses or plain values). `py_spy` is the
    program to use, '' for none, None to look for it. parts.json in the folder says for each part what became of it.
    """
    deadline = deadline or Deadline(5.0)
    try:
        folder = _new_folder(state_folder, run_id)
    except (StorageError, OSError):
        return ""
    program = find_py_spy() if py_spy is None else py_spy
    parts: dict[str, Part] = {
        "processes.json": lambda within: _json(process_table(proc, processes, within)),
        "stacks.txt": lambda within: stacks(proc, processes, program, within),
        "log-tail.txt": lambda within: log_tails(proc, processes, within),
    }
    if readings is not None:
        parts["gpus.json"] = lambda within: _json(_plain(readings))
    if kernel_log is not None:
        parts["kernel-events.json"] = lambda within: _json(_plain(kernel_log))
    became = gather(folder, parts, deadline)
    with contextlib.suppress(OSError):
        _write(folder, "parts.json", _json(became))
    prune(os.path.dirname(folder), KEEP_RUNS, keep=run_id)
    return folder


def _new_folder(state_folder: str, run_id: str) -> str:
    safe_name(run_id, "run id")
    private_folder(state_folder)
    above = private_folder(os.path.join(state_folder, "evidence"))
    return private_folder(os.path.join(above, run_id))


def gather(folder: str, parts: Mapping[str, Part], deadline: Deadline) -> dict[str, str]:
    """Write each part to the file of its name; returns what became of each: 'written', or why not."""

    def work(ask: Callable[[], Any], answer: Callable[[Any], None]) -> None:
        within = Deadline(max(0.05, deadline.remaining() - RESERVE_SECONDS))
        done: queue.Queue[tuple[str, str]] = queue.Queue()
        for name, part in parts.items():
            threading.Thread(target=_one_part, args=(folder, name, part, within, done), daemon=True).start()
        for _ in parts:
            try:
                answer(list(done.get(timeout=max(0.01, within.remaining() + RESERVE_SECONDS / 2))))
            except queue.Empty:
                return

    became: dict[str, str] = {}
    try:
        child = Child(work)
    except OSError as error:
        return dict.fromkeys(parts, f"not gathered: no process could be started: {error.strerror}")
    try:
        while len(became) < len(parts):
            name, how = child.answer(deadline)
            became[name] = how
    except (Silent, Gone, ValueError):
        pass
    finally:
        child.abandon()
    return {name: became.get(name, "not there at the deadline") for name in parts}


def _one_part(folder: str, name: str, part: Part, within: Deadline, done: queue.Queue[tuple[str, str]]) -> None:
    try:
        _write(folder, name, part(within))
        how = "written"
    except Exception as error:  # whatever it is, the other parts must not miss by it
        how = f"failed: {type(error).__name__}: {masking.mask_text(str(error))}"
    done.put((name, how))


def _write(folder: str, name: str, text: str) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    number = os.open(os.path.join(folder, name), flags, 0o600)
    try:
        write_all(number, text.encode("utf-8", "backslashreplace"))
    finally:
        os.close(number)


def _json(value: Any) -> str:
    return json.dumps(masking.mask_value(value), indent=1, default=str) + "\n"


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def prune(folder: str, keep_runs: int, keep: str = "") -> None:
    """Remove all but the newest runs' folders; `keep` always stays."""
    try:
        with os.scandir(folder) as entries:
            runs = [(entry.stat().st_mtime, entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return
    old = [name for _, name in sorted(runs, reverse=True) if name != keep][max(0, keep_runs - 1) :]
    for name in old:
        shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def _each(
    processes: Sequence[Process], ask: Callable[[Process], Any], hangs: Callable[[Process], Any], deadline: Deadline
) -> list[Any]:
    """The answer for each process, several at once; `hangs` gives it where none came before the deadline."""
    todo: queue.Queue[int] = queue.Queue()
    done: queue.Queue[tuple[int, Any]] = queue.Queue()
    for position in range(len(processes)):
        todo.put(position)

    def serve() -> None:
        while True:
            try:
                position = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((position, ask(processes[position])))
            except Exception as error:
                done.put((position, f"failed: {type(error).__name__}: {masking.mask_text(str(error))}"))

    for _ in range(min(AT_ONCE, len(processes))):
        threading.Thread(target=serve, daemon=True).start()
    answers: dict[int, Any] = {}
    with contextlib.suppress(queue.Empty):
        while len(answers) < len(processes):
            position, answer = done.get(timeout=max(0.01, deadline.remaining() - WRITE_SECONDS))
            answers[position] = answer
    return [answers[position] if position in answers else hangs(one) for position, one in enumerate(processes)]


# ---- processes ----


def process_table(proc: Proc, processes: Sequence[Process], deadline: Deadline) -> list[Any]:
    """One row for each process; one that hangs in the kernel so that it can't be read has a row that says so."""

    def hangs(process: Process) -> dict[str, Any]:
        argv = list(masking.mask_argv(process.argv))
        return {"pid": process.pid, "argv": argv, "state": process.state, "unread": "reading it did not return in time"}

    return _each(processes, lambda process: describe(proc, process), hangs, deadline)


def describe(proc: Proc, process: Process) -> dict[str, Any]:
    """One row of the process table: sizes in MiB, CPU time in seconds, start in seconds since 1970."""
    base = f"{proc.root}/{process.pid}"
    fields = _read(f"{base}/stat").rpartition(")")[2].split()
    ticks = os.sysconf("SC_CLK_TCK")
    environ = proc.environ(process.pid)
    chosen = {name: value for name, value in (environ or {}).items() if name.startswith(_ENVIRONMENT)}
    return {
        "pid": process.pid,
        "ppid": process.ppid,
        "name": process.name,
        "argv": list(masking.mask_argv(process.argv)),
        "uid": process.uid,
        "started": round(proc.start_time_epoch(process), 2),
        "state": fields[0] if fields else "gone",
        "wchan": _read(f"{base}/wchan"),
        "threads": process.threads,
        "session": process.session,
        "group": process.group,
        "cpu_user_seconds": int(fields[11]) / ticks if len(fields) > 21 else None,
        "cpu_system_seconds": int(fields[12]) / ticks if len(fields) > 21 else None,
        "rss_mib": int(fields[21]) * os.sysconf("SC_PAGE_SIZE") >> 20 if len(fields) > 21 else None,
        "cwd": proc.cwd(process.pid),
        "cgroup": proc.systemd_cgroup(process.pid),
        "environ": masking.mask_environ(chosen) if environ is not None else "could not be read",
    }


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16).strip()
    except OSError:
        return ""


# ---- stacks ----


def find_py_spy() -> str:
    """A py-spy that may be run with our rights: on PATH, and only root or we ourselves can have written it."""
    found = shutil.which("py-spy")
    if not found:
        return ""
    found = os.path.realpath(found)
    for path in (found, os.path.dirname(found)):
        facts = os.stat(path)
        if facts.st_uid not in (0, os.geteuid()) or (facts.st_mode & 0o022 and not facts.st_mode & stat.S_ISVTX):
            return ""
    return found


def stacks(proc: Proc, processes: Sequence[Process], py_spy: str, deadline: Deadline) -> str:
    """Where each process stands: its Python stacks where py-spy is at hand, else what the kernel tells.

    py-spy runs with --nonblocking: it does not stop the process, so that a server which turns out to be spared has
    not been held up, and one that hangs is not changed by being looked at.
    """
    chosen = sorted(processes, key=_telling)[:STACKS_OF]

    def one(process: Process) -> str:
        head = f"==== {process.name} (pid {process.pid}) ====\n"
        dump = ""
        if py_spy and _runs_python(process) and not deadline.expired():
            command = [py_spy, "dump", "--nonblocking", "--pid", str(process.pid)]
            seconds = min(DUMP_SECONDS, deadline.remaining() / 2)  # the kernel's view needs time as well
            answer = run_command(command, deadline.capped(seconds), most_bytes=1 << 20)
            if answer.returncode == 0:
                return head + masking.mask_text(answer.stdout) + "\n"
            lines = (answer.trouble or answer.stderr).strip().splitlines()
            dump = f"py-spy: {masking.mask_text(lines[-1]) if lines else 'failed without a word'}\n"
        return head + dump + kernel_stacks(proc, process.pid) + "\n"

    def hangs(process: Process) -> str:
        return f"==== {process.name} (pid {process.pid}) ====\nreading it did not return in time\n\n"

    texts = [str(text) for text in _each(chosen, one, hangs, deadline)]
    left = len(processes) - len(chosen)
    how = "" if py_spy else "py-spy is not installed: kernel's view only\n"
    return how + "".join(texts) + (f"and {left} more processes without stacks here\n" if left > 0 else "")


def _telling(process: Process) -> tuple[int, int]:
    words = " ".join(process.argv[:4])
    return next((rank for rank, word in enumerate(_TELLING) if word in words), len(_TELLING)), process.pid


def _runs_python(process: Process) -> bool:
    return "python" in process.exe_name or "python" in process.title or "::" in process.title


def kernel_stacks(proc: Proc, pid: int) -> str:
    """State, wait channel and (for root) kernel stack of each thread."""
    base = f"{proc.root}/{pid}/task"
    try:
        threads = sorted(os.listdir(base), key=int)
    except (OSError, ValueError):
        return "gone\n"
    lines = []
    for thread in threads[:THREADS_OF_ONE]:
        state = _read(f"{base}/{thread}/stat").rpartition(")")[2].split()[:1]
        comm, wchan = _read(f"{base}/{thread}/comm"), _read(f"{base}/{thread}/wchan")
        lines.append(f"thread {thread} {comm} state {state[0] if state else '?'} wchan {wchan or '?'}")
        lines += [f"    {line}" for line in _read(f"{base}/{thread}/stack").splitlines()]
    if len(threads) > THREADS_OF_ONE:
        lines.append(f"and {len(threads) - THREADS_OF_ONE} more threads")
    return "\n".join(lines) + "\n"


# ---- log ----


def log_tails(proc: Proc, processes: Sequence[Process], deadline: Deadline) -> str:
    """The last lines of each file (or unit's journal) that the processes write to, masked."""
    texts: list[str] = []
    seen: set[Any] = set()
    notes: list[str] = []
    for process in sorted(processes, key=_telling):
        for number in (1, 2):
            link = proc.open_file(process.pid, number)
            path = f"{proc.root}/{process.pid}/fd/{number}"
            if link.startswith("/") and not link.startswith("/dev/"):
                text = _file_tail(path, seen)
                if text is not None:
                    texts.append(f"==== {link} ====\n{text}\n")
            elif link.startswith("socket:"):
                unit = proc.systemd_cgroup(process.pid).rpartition("/")[2]
                if unit.endswith(".service") and unit not in seen:
                    seen.add(unit)
                    texts.append(f"==== journal of {unit} ====\n{_journal_tail(unit, deadline)}\n")
            elif link:
                notes.append(f"{process.name} (pid {process.pid}) writes to {link}, which keeps nothing\n")
            if len(texts) >= LOG_FILES:
                return "".join(texts)
    return "".join(texts) or "".join(dict.fromkeys(notes)) or "no process writes to a file or a journal\n"


def _file_tail(path: str, seen: set[Any]) -> str | None:
    """The end of a regular file that was not read yet, through the process's own descriptor (it may be deleted)."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        facts = os.fstat(number)
        if not stat.S_ISREG(facts.st_mode) or (facts.st_dev, facts.st_ino) in seen:
            return None
        seen.add((facts.st_dev, facts.st_ino))
        start = max(0, facts.st_size - LOG_BYTES)
        data = os.pread(number, LOG_BYTES, start)
    finally:
        os.close(number)
    lines = data.decode("utf-8", "replace").splitlines()
    if start:
        lines = lines[1:]  # cut off somewhere: what is left of a secret would not be known as one
    return _masked_lines(lines)


def _journal_tail(unit: str, deadline: Deadline) -> str:
    command = ["journalctl", "--no-pager", "--quiet", "-o", "short-iso", "-n", str(LOG_LINES), "-u", unit]
    answer = run_command(command, deadline.capped(DUMP_SECONDS), most_bytes=8 << 20)
    if answer.returncode != 0:
        return f"could not be read: {answer.trouble or answer.stderr.strip() or answer.returncode}"
    return _masked_lines(answer.stdout.splitlines())


def _masked_lines(lines: list[str]) -> str:
    return "\n".join(line[:LINE_CHARACTERS] for line in masking.mask_text("\n".join(lines[-LOG_LINES:])).split("\n"))
