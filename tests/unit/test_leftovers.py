from __future__ import annotations

import mmap
import os
import py_compile
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from gpu_host import filesystems, leftovers
from gpu_host.filesystems import Mount
from gpu_host.holders import look
from gpu_host.leftovers import BYTECODE, LOCK, SEGMENT, Leftover, Refused, Surroundings, find, remove, remove_all
from gpu_host.procfs import Proc, Process
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

# Whoever runs the tests need not be root: only his own processes count, as with own_processes_only.
HERE = Surroundings(Proc(), sees=lambda process: process.uid == os.getuid(), own_folders=("/",))
HOLD = """
import ctypes, mmap, os, sys, threading, time
how, path = sys.argv[1], sys.argv[2]
if how == "cwd":
    os.chdir(path)
elif how == "open":
    file = open(path, "rb")
elif how == "map":
    with open(path, "r+b") as file:
        view = mmap.mmap(file.fileno(), 4096)
elif how == "thread":
    file = open(path, "rb")
    threading.Thread(target=lambda: time.sleep(60)).start()
print("holding", flush=True)
if how == "thread":
    libc = ctypes.CDLL(None)
    libc.syscall(60, 0)  # exit, not exit_group: the first thread ends, the other lives on (x86_64)
time.sleep(60)
"""
Starter = Callable[..., subprocess.Popen]


@pytest.fixture
def start() -> Iterator[Starter]:
    started: list[subprocess.Popen] = []

    def begin(how: str, path: Path | str = "", **options: object) -> subprocess.Popen:
        command = [sys.executable, "-c", HOLD, how, str(path)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload]
        started.append(process)
        assert process.stdout is not None and process.stdout.readline() == "holding\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def ended_pid() -> int:
    """A pid that was given out and is free again."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def segment(folder: Path, name: str, size: int = 4096) -> Path:
    path = folder / name
    path.write_bytes(b"\0" * size)
    return path


def only(items: list[Leftover]) -> Leftover:
    (item,) = items
    return item


def alive(process: subprocess.Popen) -> Process:
    found = Proc().process(process.pid)
    assert found is not None
    return found


# ---- shared memory ----

PIDLESS = ["psm_0a1b2c3d", "nccl-AbC123", "sglang_loads_0a1b_2c3d4e5f.shm", "sglang_host_pool_00ff.mmap"]
WITH_PID = [
    "sgl_shm_mm_{}_0a1b2c3d",
    "sgl_shm_mq_{}_7",
    "sem.loky-{}-x1y2",
    "torch_{}_123456_0",
    "multi_tokenizer_args_{}",
]


@pytest.mark.parametrize("pattern", WITH_PID)
def test_a_segment_of_a_dead_creator_goes(tmp_path: Path, pattern: str) -> None:
    path = segment(tmp_path, pattern.format(ended_pid()))
    item = only(find(HERE, shm_folder=str(tmp_path)))
    assert (item.kind, item.deletable, item.path) == (SEGMENT, True, str(path))
    assert remove(item, HERE).removed
    assert not path.exists()


@pytest.mark.parametrize("pattern", WITH_PID)
def test_a_segment_of_a_living_creator_stays(tmp_path: Path, start: Starter, pattern: str) -> None:
    creator = start("nothing")
    path = segment(tmp_path, pattern.format(creator.pid))
    item = only(find(HERE, shm_folder=str(tmp_path)))
    assert not item.deletable and f"pid {creator.pid}" in item.why_kept
    assert not remove(replace(item, deletable=True), HERE).removed
    assert path.exists()
    victims = replace(HERE, as_if_dead=frozenset([creator.pid]))
    assert only(find(victims, shm_folder=str(tmp_path))).deletable, "check mode judges as if the victim were dead"
    assert not remove(only(find(victims, shm_folder=str(tmp_path))), victims).removed, "but never deletes by it"


@pytest.mark.parametrize("how", ["open", "map", "thread"])
@pytest.mark.parametrize("name", ["psm_0a1b2c3d", "sgl_shm_mm_{}_0a1b2c3d"])
def test_a_segment_that_a_live_process_holds_stays(tmp_path: Path, start: Starter, how: str, name: str) -> None:
    path = segment(tmp_path, name.format(ended_pid()))
    holder = start(how, path)
    if how == "thread":
        until = time.monotonic() + 5
        while alive(holder).state != "Z":
            assert time.monotonic() < until
            time.sleep(0.01)
    item = only(find(HERE, shm_folder=str(tmp_path)))
    assert not item.deletable
    assert f"pid {holder.pid}" in item.why_kept
    if how == "map":
        descriptors = [os.readlink(f"/proc/{holder.pid}/fd/{n}") for n in os.listdir(f"/proc/{holder.pid}/fd")]
        assert str(path) in descriptors or str(path) in (Proc().maps(holder.pid) or ())
    holder.kill()
    holder.wait()
    assert remove(only(find(HERE, shm_folder=str(tmp_path))), HERE).removed


def test_a_segment_that_is_mapped_under_another_name_stays(tmp_path: Path, start: Starter) -> None:
    path = segment(tmp_path, "other-name")
    holder = start("map", path)
    os.link(path, tmp_path / "psm_0a1b2c3d")
    item = only(find(HERE, shm_folder=str(tmp_path)))
    assert not item.deletable and f"pid {holder.pid}" in item.why_kept


def test_nobody_looks_for_living_servers_where_nothing_was_left_behind(tmp_path: Path) -> None:
    def alive() -> tuple[Process, ...]:
        raise AssertionError("a look at all processes for nothing")

    segment(tmp_path, "a_name_of_nobody")
    assert find(replace(HERE, alive=alive), shm_folder=str(tmp_path), lock_folders=[str(tmp_path)]) == []


@pytest.mark.parametrize("name", PIDLESS)
def test_a_name_without_pid_goes_only_when_no_server_of_that_user_lives(
    tmp_path: Path, start: Starter, name: str
) -> None:
    path = segment(tmp_path, name)
    server = alive(start("nothing"))
    with_server = replace(HERE, alive=lambda: (server,))
    item = only(find(with_server, shm_folder=str(tmp_path)))
    assert not item.deletable and f"pid {server.pid}" in item.why_kept
    of_another = replace(HERE, alive=lambda: (replace(server, uid=server.uid + 1),))
    item = only(find(of_another, shm_folder=str(tmp_path)))
    assert item.deletable
    assert not remove(item, with_server).removed, "a server that came meanwhile keeps it"
    assert remove(item, of_another).removed
    assert not path.exists()


def test_a_segment_older_than_the_process_with_its_pid_goes(tmp_path: Path, start: Starter) -> None:
    process = start("nothing")
    path = segment(tmp_path, f"sgl_shm_mm_{process.pid}_0a1b2c3d")

    class LateProc(Proc):
        def start_time_epoch(self, process: Process) -> float:
            return path.stat().st_ctime + self.seconds_later

        seconds_later = 0.0

    for seconds, goes in ((-100.0, False), (0.0, False), (1.0, False), (3.0, True)):
        LateProc.seconds_later = seconds
        item = only(find(replace(HERE, proc=LateProc()), shm_folder=str(tmp_path)))
        assert item.deletable is goes, seconds


@pytest.mark.parametrize(
    "name",
    [
        "important",
        "sgl_shm_mm_12x_1",
        "psm_",
        "psm_../x",
        "sglang_download_lock_ab",
        "sem.mp-abc",
        "torch_x_1",
        "xpsm_0a1b2c3d",
        "psm_0a1b2c3d\n",
        "psm_0a1b2c3d\nx",
        "nccl-",
        "lock",
        "tmpabcdef",
        "sgl_shm_mm_1_2\n",
        "pulse-shm-1",
        "sem.mysem",
    ],
)
def test_a_name_of_no_known_kind_is_never_looked_at(tmp_path: Path, name: str) -> None:
    if "/" not in name:
        segment(tmp_path, name)
    assert find(HERE, shm_folder=str(tmp_path)) == []


def test_links_folders_and_pipes_under_a_known_name_stay(tmp_path: Path) -> None:
    precious = segment(tmp_path, "precious")
    (tmp_path / "psm_00000001").symlink_to(precious)
    (tmp_path / "psm_00000002").mkdir()
    os.mkfifo(tmp_path / "psm_00000003")
    items = find(HERE, shm_folder=str(tmp_path))
    assert [item.deletable for item in items] == [False] * 3
    for item in items:
        assert not remove(replace(item, deletable=True), HERE).removed
    assert precious.exists()


def test_a_file_replaced_between_look_and_delete_stays(tmp_path: Path) -> None:
    path = segment(tmp_path, "psm_0a1b2c3d")
    item = only(find(HERE, shm_folder=str(tmp_path)))
    segment(tmp_path, "new")
    os.rename(tmp_path / "new", path)
    assert not (outcome := remove(item, HERE)).removed and "changed" in outcome.why
    item = only(find(HERE, shm_folder=str(tmp_path)))
    path.unlink()
    path.symlink_to("/etc/passwd")
    assert not remove(item, HERE).removed
    path.unlink()
    assert "gone already" in remove(item, HERE).why


def test_a_file_opened_between_look_and_delete_stays(tmp_path: Path, start: Starter) -> None:
    path = segment(tmp_path, "psm_0a1b2c3d")
    item = only(find(HERE, shm_folder=str(tmp_path)))
    start("open", path)
    assert not remove(item, HERE).removed
    assert path.exists()


def test_a_folder_swapped_for_another_between_look_and_delete_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "shm").mkdir()
    (tmp_path / "other").mkdir()
    segment(tmp_path / "shm", "psm_0a1b2c3d")
    theirs = segment(tmp_path / "other", "psm_0a1b2c3d")
    item = only(find(HERE, shm_folder=str(tmp_path / "shm")))
    (tmp_path / "shm").rename(tmp_path / "was")
    (tmp_path / "shm").symlink_to(tmp_path / "other")
    assert not remove(item, HERE).removed
    assert theirs.exists()


def test_every_removal_is_told_at_once(tmp_path: Path) -> None:
    for name in PIDLESS:
        segment(tmp_path, name)
    told: list[tuple[str, bool]] = []
    outcomes = remove_all(
        find(HERE, shm_folder=str(tmp_path)), HERE, lambda done: told.append((done.path, os.path.exists(done.path)))
    )
    assert told == [(outcome.path, False) for outcome in outcomes]
    assert len(told) == len(PIDLESS)
    assert find(HERE, shm_folder=str(tmp_path)) == [], "a second run finds nothing"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PIDLESS + WITH_PID), st.sampled_from(["open", "map", "free"])), max_size=6))
def test_nothing_that_is_open_or_mapped_is_ever_deleted(tmp_path: Path, plan: list[tuple[str, str]]) -> None:
    folder = tmp_path / str(time.monotonic_ns())
    folder.mkdir()
    dead, held = ended_pid(), []
    try:
        for number, (pattern, how) in enumerate(plan):
            name = pattern.format(dead).replace("0a1b", f"{number:04x}").replace("AbC123", f"AbC12{number}")
            path = segment(folder, name)
            if how == "open":
                held.append((path, open(path, "rb")))  # noqa: SIM115
            elif how == "map":
                with open(path, "r+b") as file:
                    held.append((path, mmap.mmap(file.fileno(), 4096)))
        remove_all(find(HERE, shm_folder=str(folder)), HERE)
        left = set(folder.iterdir())
        assert left == {path for path, _ in held}
    finally:
        for _, holding in held:
            holding.close()


# ---- what can't be known ----


@pytest.mark.parametrize(
    "kind", ["nfs", "nfs4", "lustre", "cifs", "ceph", "fuse.sshfs", "9p", "virtiofs", "gpfs", "beegfs", "new"]
)
def test_nothing_on_a_network_file_system_goes(tmp_path: Path, kind: str) -> None:
    remote = replace(HERE, mount_of=lambda folder: Mount(1, "0:1", "/", str(tmp_path), kind))
    segment(tmp_path, "psm_0a1b2c3d")
    lock_at(tmp_path / "home")
    source_tree(tmp_path / "tree")
    items = find(remote, [str(tmp_path / "tree")], [str(tmp_path / "home/.cache/torch_extensions")], str(tmp_path))
    assert {item.kind for item in items} == {SEGMENT, LOCK, BYTECODE}
    assert not any(item.deletable for item in items)
    assert all(kind in item.why_kept for item in items)
    local = replace(HERE, mount_of=lambda folder: Mount(1, "0:1", "/", str(tmp_path), "ext4"))
    again = find(local, [str(tmp_path / "tree")], [str(tmp_path / "home/.cache/torch_extensions")], str(tmp_path))
    assert all(item.deletable for item in again)
    unknown = replace(HERE, mount_of=lambda folder: None)
    assert not only(find(unknown, shm_folder=str(tmp_path))).deletable


def test_in_a_guest_a_folder_mounted_from_outside_may_be_shared() -> None:
    table = [Mount(1, "8:1", "/guests/a", "/", "ext4")]
    ours = Mount(2, "8:1", "/guests/a/data", "/data", "ext4")
    outside = Mount(3, "8:1", "/guests/b", "/b", "ext4")
    other_disk = Mount(4, "8:2", "/pool", "/pool", "xfs")
    for mount, private in ((table[0], True), (ours, True), (outside, False), (other_disk, False)):
        assert (filesystems.why_not_private(mount, True, table) == "") is private
        assert filesystems.why_not_private(mount, False, table) == ""


def test_the_mount_of_an_open_folder_is_told(tmp_path: Path) -> None:
    folder, _ = filesystems.open_folder(str(tmp_path))
    proc, _ = filesystems.open_folder("/proc")
    try:
        mount = filesystems.mount_of(folder)
        assert mount is not None and (mount.point == "/" or str(tmp_path).startswith(mount.point))
        kernel = filesystems.mount_of(proc)
        assert kernel is not None and kernel.type == "proc" and not kernel.local
    finally:
        os.close(folder)
        os.close(proc)


def fake_process(
    root: Path, pid: int, nspid: int | None = None, uid: int = 0, start: int = 1, readable: bool = True
) -> Path:
    """A process in a fake /proc; without `fd` and `maps` when it can't be looked into."""
    folder = root / str(pid)
    (folder / "ns").mkdir(parents=True)
    fields = ["S", "1"] + ["0"] * 15 + ["1", "0", str(start)] + ["0"] * 10
    fields[17 + 0] = "1"
    (folder / "stat").write_text(f"{pid} (python) " + " ".join(fields))
    (folder / "status").write_text(f"Name:\tpython\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nNSpid:\t{pid}\t{nspid or pid}\n")
    (folder / "cmdline").write_bytes(b"python\0job.py\0")
    if readable:
        (folder / "fd").mkdir()
        (folder / "maps").write_text("")
    return folder


def test_what_an_unreadable_process_may_hold_stays(tmp_path: Path) -> None:
    root, shm = tmp_path / "proc", tmp_path / "shm"
    shm.mkdir()
    fake_process(root, 500, readable=False, uid=4000)
    path = segment(shm, "psm_0a1b2c3d")
    here = Surroundings(Proc(str(root)), own_folders=("/",))
    path.chmod(0o644)
    item = only(find(here, shm_folder=str(shm)))
    assert not item.deletable and "pid 500" in item.why_kept and "root" in item.why_kept
    path.chmod(0o600)
    assert only(find(here, shm_folder=str(shm))).deletable, "another user can't have opened it"
    fake_process(root, 501, readable=False, uid=path.stat().st_uid)
    assert not only(find(here, shm_folder=str(shm))).deletable
    outside = replace(here, sees=lambda process: process.pid not in (500, 501))
    assert only(find(outside, shm_folder=str(shm))).deletable


def test_a_creator_is_known_by_the_pid_of_his_own_namespace(tmp_path: Path) -> None:
    root, shm = tmp_path / "proc", tmp_path / "shm"
    shm.mkdir()
    fake_process(root, 70001, nspid=42)
    segment(shm, "sgl_shm_mm_42_aa")
    segment(shm, "sgl_shm_mm_70001_aa")
    items = {
        item.path[-11:]: item.deletable
        for item in find(Surroundings(Proc(str(root)), own_folders=("/",)), shm_folder=str(shm))
    }
    assert items == {"shm_mm_42_aa"[-11:]: False, "m_70001_aa"[-11:].rjust(11, "m"): True}


def test_a_guest_that_does_not_have_the_folder_mounted_is_not_the_creator(tmp_path: Path) -> None:
    root, shm = tmp_path / "proc", tmp_path / "shm"
    shm.mkdir()
    guest = fake_process(root, 70001, nspid=42)
    segment(shm, "sgl_shm_mm_42_aa")
    device = shm.stat().st_dev
    here = f"{os.major(device)}:{os.minor(device)}"
    (root / "self/ns").mkdir(parents=True)
    (root / "self/ns/mnt").symlink_to("mnt:[1]")
    (root / "self/mountinfo").write_text(f"1 0 {here} / / rw - ext4 x rw\n")
    (guest / "ns/mnt").symlink_to("mnt:[2]")
    surroundings = Surroundings(Proc(str(root)), own_folders=("/",))
    (guest / "mountinfo").write_text(f"5 0 {here} /x / rw - ext4 x rw\n")
    assert not only(find(surroundings, shm_folder=str(shm))).deletable
    (guest / "mountinfo").write_text("5 0 0:99 / / rw - overlay x rw\n")
    assert only(find(surroundings, shm_folder=str(shm))).deletable


def test_asking_who_holds_a_file_never_touches_a_network_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "proc"
    process = fake_process(root, 500)
    (process / "fd/3").symlink_to("/net/server/file")
    (process / "fd/4").symlink_to("/etc/passwd")
    (process / "mountinfo").write_text("5 0 0:99 / /net/server rw - nfs4 x rw\n")
    asked: list[str] = []
    real = os.stat

    def noting(path: str | int, **options: bool) -> os.stat_result:
        asked.append(str(path))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", noting)
    holders = look(Proc(str(root)))
    assert any(path.endswith("fd/4") for path in asked) and not any(path.endswith("fd/3") for path in asked)
    assert list(holders.open.values()) == [{500}]


# ---- FileBaton locks ----


def lock_at(home: Path, inner: str = "py312_cu130/my_ext", text: str = "") -> Path:
    folder = home / ".cache/torch_extensions" / inner
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lock").write_text(text)
    return folder / "lock"


def locks(home: Path, surroundings: Surroundings = HERE) -> list[Leftover]:
    return find(surroundings, lock_folders=[str(home / ".cache/torch_extensions")])


@pytest.mark.parametrize("inner", ["py312_cu130/my_ext", "py310_cpu/other", "named_by_variable", "py313t_cu129/x y"])
def test_a_lock_without_an_owner_goes(tmp_path: Path, inner: str) -> None:
    path = lock_at(tmp_path, inner)
    item = only(locks(tmp_path))
    assert item.kind == LOCK and item.deletable
    assert remove(item, HERE).removed
    assert not path.exists() and path.parent.exists()


@pytest.mark.parametrize("inner", ["py312_cu130", "py312_cu130/my_ext/deeper", ".", "my_ext/deeper"])
def test_a_lock_elsewhere_in_the_cache_is_never_looked_at(tmp_path: Path, inner: str) -> None:
    lock_at(tmp_path, inner)
    assert locks(tmp_path) == []


def test_a_lock_that_is_not_empty_stays(tmp_path: Path) -> None:
    lock_at(tmp_path, text="x")
    assert "not empty" in only(locks(tmp_path)).why_kept


@pytest.mark.parametrize("name", [".ninja_lock", "lock.lock", "x.lock", ".my_ext.sglang.lock", "Lock"])
def test_a_flock_file_is_never_looked_at(tmp_path: Path, name: str) -> None:
    path = lock_at(tmp_path)
    path.rename(path.with_name(name))
    assert locks(tmp_path) == []


def test_a_lock_whose_owner_has_it_open_stays(tmp_path: Path, start: Starter) -> None:
    owner = start("open", lock_at(tmp_path))
    item = only(locks(tmp_path))
    assert not item.deletable and f"pid {owner.pid}" in item.why_kept
    assert only(locks(tmp_path, replace(HERE, as_if_dead=frozenset([owner.pid])))).deletable
    owner.send_signal(signal.SIGSTOP)
    assert not only(locks(tmp_path)).deletable, "a stopped owner is an owner"


def test_a_lock_in_whose_folder_a_compiler_still_works_stays(tmp_path: Path, start: Starter) -> None:
    ninja = start("cwd", lock_at(tmp_path).parent)
    assert f"pid {ninja.pid}" in only(locks(tmp_path)).why_kept


def test_a_lock_stays_while_a_server_of_the_same_user_lives(tmp_path: Path, start: Starter) -> None:
    lock_at(tmp_path)
    server = alive(start("nothing"))
    assert f"pid {server.pid}" in only(locks(tmp_path, replace(HERE, alive=lambda: (server,)))).why_kept


def test_a_mapped_file_that_is_also_called_lock_owns_no_lock(tmp_path: Path, start: Starter) -> None:
    lock_at(tmp_path)
    start("map", segment(tmp_path, "lock"))
    assert only(locks(tmp_path)).deletable


def test_a_lock_taken_again_between_look_and_delete_stays(tmp_path: Path) -> None:
    path = lock_at(tmp_path)
    item = only(locks(tmp_path))
    path.unlink()
    time.sleep(0.02)
    lock_at(tmp_path)
    assert not remove(item, HERE).removed
    assert path.exists()


def test_a_link_of_another_user_leads_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lock_at(tmp_path / "theirs")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/.cache").symlink_to(tmp_path / "theirs/.cache")
    real = filesystems.open_folder
    assert only(locks(tmp_path / "home")).deletable, "one's own link to one's own folder is followed"

    def owned_by_another(folder: str) -> tuple[int, frozenset[int]]:
        return real(folder)[0], frozenset([path.stat().st_uid + 1])

    monkeypatch.setattr(filesystems, "open_folder", owned_by_another)
    item = only(locks(tmp_path / "home"))
    assert not item.deletable and "link" in item.why_kept


def test_the_owners_of_the_links_on_a_path_are_told(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "link").symlink_to("a")
    (tmp_path / "absolute").symlink_to(tmp_path / "link/b")
    (tmp_path / "loop").symlink_to("loop")
    folder, owners = filesystems.open_folder(str(tmp_path / "absolute"))
    assert os.path.samestat(os.fstat(folder), os.stat(tmp_path / "a/b"))
    os.close(folder)
    assert owners == frozenset({os.getuid()} - {0})
    with pytest.raises(OSError):
        filesystems.open_folder(str(tmp_path / "loop"))


def test_folders_of_locks_come_from_the_users_and_their_environments() -> None:
    found = leftovers.default_lock_folders(
        [0, 4_000_000_000],
        [{"TORCH_EXTENSIONS_DIR": "/data/ext/"}, {"HOME": "/home/x"}, {"XDG_CACHE_HOME": "/c"}, {"HOME": "relative"}],
    )
    assert found == [
        "/root/.cache/torch_extensions",
        "/data/ext",
        "/home/x/.cache/torch_extensions",
        "/c/torch_extensions",
    ]


# ---- bytecode ----


def source_tree(tree: Path) -> Path:
    (tree / "pkg/inner").mkdir(parents=True)
    for module in ("pkg/__init__", "pkg/one", "pkg/inner/__init__"):
        (tree / f"{module}.py").write_text("x = 1\n")
        py_compile.compile(str(tree / f"{module}.py"))
    return tree


def test_bytecode_of_a_named_tree_goes_and_nothing_else(tmp_path: Path) -> None:
    tree = source_tree(tmp_path / "tree")
    elsewhere = source_tree(tmp_path / "elsewhere")
    cache = tree / "pkg/__pycache__"
    (cache / "gone.cpython-312.pyc").write_bytes(b"no source")
    (cache / "notes.txt").write_text("mine")
    (tree / "pkg/legacy.pyc").write_bytes(b"sourceless module")
    (tree / "linked").symlink_to(elsewhere)
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    outcomes = remove_all(find(HERE, [str(tree)]), HERE)
    gone = before - {path for path in tmp_path.rglob("*") if path.is_file()}
    assert sorted(str(path) for path in gone) == sorted(outcome.path for outcome in outcomes if outcome.removed)
    tag = sys.implementation.cache_tag
    assert {str(path.relative_to(tree)) for path in gone} == {
        f"pkg/__pycache__/__init__.{tag}.pyc",
        f"pkg/__pycache__/one.{tag}.pyc",
        f"pkg/inner/__pycache__/__init__.{tag}.pyc",
    }
    assert find(HERE, [str(tree)]) == []


def test_bytecode_of_a_named_module_goes(tmp_path: Path) -> None:
    source_tree(tmp_path / "site")
    source_tree(tmp_path / "other")
    items = find(HERE, ["pkg.inner"], module_search_path=[str(tmp_path / "site")])
    assert [os.path.dirname(item.path) for item in items] == [str(tmp_path / "site/pkg/inner/__pycache__")]
    assert "pkg" not in sys.modules, "nothing is imported"
    with pytest.raises(Refused, match="nosuch"):
        find(HERE, ["nosuch.module"], module_search_path=[str(tmp_path / "site")])


@pytest.mark.parametrize(
    "name", ["/", "/usr", "/home", "/root", "/tmp", "relative/path", "/nonexistent/tree", "~", "", "a b"]
)
def test_a_path_that_is_no_source_tree_is_refused_with_one_sentence(name: str) -> None:
    with pytest.raises(Refused) as caught:
        find(HERE, [name])
    assert str(caught.value).count(".") >= 1 and "\n" not in str(caught.value)


def test_a_folder_without_a_python_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "models/a/b/c").mkdir(parents=True)
    (tmp_path / "models/a/b/c/__init__.py").write_text("")
    with pytest.raises(Refused, match="no Python package"):
        find(HERE, [str(tmp_path / "models")])


def test_the_modules_of_a_server_are_looked_for_where_its_python_does(tmp_path: Path) -> None:
    site = tmp_path / "venv/lib/python3.12/site-packages"
    site.mkdir(parents=True)
    (tmp_path / "src").mkdir()
    found = leftovers.module_search_path(
        [str(tmp_path / "venv/bin/python"), "-m", "sglang.launch_server"],
        {"PYTHONPATH": f"{tmp_path / 'src'}:rel"},
        "/",
    )
    assert found == [str(tmp_path / "src"), "/", str(site)]


def test_a_path_with_a_newline_is_shown_on_one_line(tmp_path: Path) -> None:
    lock_at(tmp_path, "py312_cu130/a\nb\udcff")
    item = only(locks(tmp_path))
    assert item.deletable and "\n" not in item.shown
    item.shown.encode()
    assert remove(item, HERE).removed


def test_free_space_is_told_in_mib(tmp_path: Path) -> None:
    free = filesystems.free_mib(str(tmp_path))
    facts = os.statvfs(tmp_path)
    assert free is not None and abs(free - facts.f_bavail * facts.f_frsize // 2**20) < 1000
    assert filesystems.free_mib("/nonexistent") is None
