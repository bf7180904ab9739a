"""The image of a lab host: Debian 12 with systemd and sshd, built without a container registry.

The file system is made by mmdebstrap into a tar, the tar is imported into an image store of this checkout,
and every lab uses that store read-only. Both lie in `.lab-cache/`, under a name that is the hash of the
recipe: they are built again only when the recipe changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("LAB_CACHE") or REPOSITORY / ".lab-cache")
STORE = CACHE / "store"

SUITE = "bookworm"
SYSTEM_PYTHON = "3.11"
PACKAGES = (
    "systemd", "systemd-sysv", "dbus", "libpam-systemd", "openssh-server", "python3", "psmisc", "procps",
    "iproute2", "sudo", "rsync", "python3-libtorrent", "iperf3", "cron",
)  # fmt: skip
PROGRAMS = ("podman", "runc", "mmdebstrap", "iptables", "nsenter", "ip", "ssh", "ssh-keygen")
WHEELS = ("nvidia-ml-py", "setproctitle", "py-spy")

# $1 is the new root. Host keys are made once, in the image: a host is ready sooner, and nobody trusts them.
CUSTOMIZE = r"""
set -e
cp -r "$LAB_WHEELS/." "$1/usr/local/lib/python3.11/dist-packages/"
mv "$1/usr/local/lib/python3.11/dist-packages/bin/py-spy" "$1/usr/local/bin/py-spy"
rm -rf "$1/usr/local/lib/python3.11/dist-packages/bin"
chroot "$1" useradd --create-home --shell /bin/bash --uid 1000 engineer
echo 'engineer ALL=(ALL) NOPASSWD: ALL' > "$1/etc/sudoers.d/engineer"
chmod 0440 "$1/etc/sudoers.d/engineer"
printf '%s\n' 'PermitRootLogin prohibit-password' 'PasswordAuthentication no' 'UseDNS no' 'MaxStartups 100' \
  'AuthorizedKeysFile /etc/ssh/lab_keys .ssh/authorized_keys' > "$1/etc/ssh/sshd_config.d/lab.conf"
for unit in systemd-timesyncd.service apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer \
    e2scrub_reap.service fstrim.timer systemd-firstboot.service console-getty.service getty.target \
    systemd-resolved.service systemd-pstore.service systemd-network-generator.service; do
  ln -sf /dev/null "$1/etc/systemd/system/$unit"
done
rm -f "$1/etc/systemd/system/multi-user.target.wants/cron.service" # it would be started everywhere
: > "$1/etc/machine-id"
rm -rf "$1"/usr/share/doc/* "$1"/usr/share/man/* "$1"/usr/share/locale/* "$1"/var/cache/apt/*
"""


class LabUnavailableError(RuntimeError):
    """The lab can't run here; the message says what to install or change."""


def recipe_hash() -> str:
    """Name of the image that today's recipe would build."""
    recipe = repr((SUITE, SYSTEM_PYTHON, PACKAGES, WHEELS, CUSTOMIZE))
    return hashlib.sha256(recipe.encode()).hexdigest()[:12]


def image_name() -> str:
    return f"localhost/gpu-lab-host:{recipe_hash()}"


def require(*programs: str) -> None:
    """Raise LabUnavailableError unless this is root on a machine that has the programs."""
    if os.geteuid() != 0:
        raise LabUnavailableError("The lab needs root (it makes network namespaces and containers): run this as root.")
    packages = {"nsenter": "util-linux", "ip": "iproute2", "ssh": "openssh-client", "ssh-keygen": "openssh-client"}
    helpers = [name for name in ("netavark", "aardvark-dns") if "podman" in programs and not _is_helper(name)]
    missing = [packages.get(name, name) for name in programs if shutil.which(name) is None] + helpers
    if missing:
        names = " ".join(dict.fromkeys(missing))
        raise LabUnavailableError(
            f"The lab lacks {names} on this machine: apt-get install --no-install-recommends {names}"
        )


def _is_helper(name: str) -> bool:
    """Whether one of podman's helper programs is in a folder where podman looks for it."""
    folders = ("/usr/lib/podman", "/usr/libexec/podman", "/usr/local/lib/podman", "/usr/local/libexec/podman")
    return shutil.which(name) is not None or any(Path(folder, name).is_file() for folder in folders)


@contextmanager
def _one_builder() -> Iterator[None]:
    """Hold the lock of the cache folder, which git ignores by its own file."""
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / ".gitignore").write_text("*\n")
    with open(CACHE / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build() -> str:
    """Make sure that the image is there; return its name.

    The first time takes about 40 seconds and needs a Debian mirror and a Python package index; after that
    nothing is fetched.
    """
    require("podman", "runc")
    tar = CACHE / f"{recipe_hash()}.tar"
    with _one_builder():
        if _in_store():
            return image_name()
        if not tar.is_file():
            require("mmdebstrap")
            print("building the image of the lab hosts (about 40 seconds, once) ...", file=sys.stderr, flush=True)
            _build_tar(tar)
        _run([*store_podman(), "import", str(tar), image_name()], "importing the image of the lab hosts")
        for old in CACHE.glob("*.tar"):
            if old != tar:
                old.unlink()
    return image_name()


def store_podman() -> list[str]:
    return ["podman", "--root", str(STORE), "--runroot", str(CACHE / "store-run"), "--log-level", "error"]


def _in_store() -> bool:
    return subprocess.run([*store_podman(), "image", "exists", image_name()], capture_output=True).returncode == 0


def _build_tar(tar: Path) -> None:
    wheels = CACHE / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    platforms = [f"--platform={name}_x86_64" for name in ("manylinux2014", "manylinux_2_17", "manylinux_2_28")]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", f"--target={wheels}", "--no-deps"]
    pip += [f"--python-version={SYSTEM_PYTHON}", "--implementation=cp", "--only-binary=:all:", *platforms]
    _run([*pip, *WHEELS], "fetching the Python packages of the lab hosts")
    part = tar.with_suffix(".part.tar")
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
    command += [f"--customize-hook={CUSTOMIZE}", SUITE, str(part)]
    _run(command, "building the image of the lab hosts", {"LAB_WHEELS": str(wheels)})
    part.rename(tar)
    shutil.rmtree(wheels)


def _run(command: list[str], doing: str, environment: dict[str, str] | None = None) -> None:
    """Run one step of the build; raise LabUnavailableError with the end of its output when it fails."""
    done = subprocess.run(
        command, env=os.environ | (environment or {}), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    if done.returncode != 0:
        raise LabUnavailableError(f"{doing} failed: {' '.join(command[:3])} ... said:\n{done.stdout[-2000:]}")
