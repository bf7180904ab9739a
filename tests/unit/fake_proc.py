"""A /proc folder made of files, for cases that no real machine shows on demand."""
from __future__ import annotations

from pathlib import Path
from typing import Any

PF_KTHREAD = 0x00200000


class FakeProc:
    """Writes what procfs.Proc reads. Every field has an ordinary default."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "namespace").touch()
        self.add(1, ppid=0, argv=["/sbin/init"], exe="/usr/lib/systemd/systemd", start=1)
        self._link(root / "self", "1")

    def add(
        self,
        pid: int,
        ppid: int = 1,
        argv: list[str] | None = None,
        exe: str | None = None,
        start: int | None = None,
        state: str = "S",
        session: int | None = None,
        group: int | None = None,
        uid: int = 0,
        threads: int = 1,
        tty: int = 0,
        environ: dict[str, str] | None = None,
        blanked: bool = False,
        maps: list[str] | None = None,
        files: list[str] | None = None,
        cgroup: str = "/",
        cwd: str = "/",
        namespaced: int | None = None,
        kernel_thread: bool = False,
        own_namespace: bool = False,
    ) -> None:
        folder = self.root / str(pid)
        (folder / "fd").mkdir(parents=True, exist_ok=True)
        words = argv or []
        executable = exe if exe is not None else (words[0] if words and words[0].startswith("/") else "")
        comm = Path(words[0]).name[:15] if words else "kworker/0:1"
        flags = PF_KTHREAD if kernel_thread else 0x00400000
        fields = [state, ppid, group or pid, session or pid, tty, -1, flags, 0, 0, 0, 0, 0, 0, 0, 0, 20, 0, threads, 0]
        fields += [start if start is not None else 1000 + pid, 0, 0]
        (folder / "stat").write_text(f"{pid} ({comm}) {' '.join(map(str, fields))}\n")
        uids = "\t".join([str(uid)] * 4)
        (folder / "status").write_text(f"Name:\t{comm}\nUid:\t{uids}\nNSpid:\t{pid}\t{namespaced or pid}\n")
        (folder / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in words))
        if environ is not None or blanked:
            pairs = b"".join(f"{name}={value}\0".encode() for name, value in (environ or {"PATH": "/bin"}).items())
            (folder / "environ").write_bytes(bytes(len(pairs)) if blanked else pairs)
        (folder / "maps").write_text(
            "".join(f"7f00-7f01 r--p 00000000 00:01 {100 + i} {path}\n" for i, path in enumerate(maps or []))
        )
        (folder / "cgroup").write_text(f"0::{cgroup}\n")
        (folder / "ns").mkdir(exist_ok=True)
        (folder / "ns" / "pid").touch()
        if not own_namespace:
            (folder / "ns" / "pid").unlink()
            (folder / "ns" / "pid").hardlink_to(self.root / "namespace")
        self._link(folder / "cwd", cwd)
        if executable:
            self._link(folder / "exe", executable)
        for number, target in enumerate(files or []):
            self._link(folder / "fd" / str(number), target)

    def load(self, processes: list[dict[str, Any]]) -> None:
        """Add processes as a case file describes them."""
        for fields in processes:
            self.add(**{name: value for name, value in fields.items() if name not in ("is", "group_of", "main")})

    @staticmethod
    def _link(path: Path, target: str) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target)
