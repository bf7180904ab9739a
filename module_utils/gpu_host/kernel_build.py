"""Builds the kernel package for a host's GPUs, or takes a wheel, installs it for the server's Python and checks it.

A wheel is kept under a key made of the source's commit, CUDA, torch, Python, architecture and options. What is
installed is remembered with the digest of its file list, so that an unchanged host costs one look. The long parts
(fetching, compiling, installing) are jobs of their own (job.py), which later calls follow.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import os
import re
import shutil
import sys
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import cuda_toolkit, host_facts, job, kernel_package, kernel_source, masking, python_packages, readings, versions
from .child import run_command
from .deadline import Deadline
from .kernel_source import Source, SourceError
from .storage import write_private

# MiB that one compiler process takes at its peak: flash attention's templates with one architecture.
MIB_PER_JOB = 4096
# Of the memory that is free now, this share may be used.
MEMORY_SHARE = 0.85
# Installed beside the build, not into the server's environment. torch is the server's own: hence no build isolation.
TOOLS = ("scikit-build-core>=0.10", "cmake>=3.26", "ninja", "wheel")
# Beside a wheel of which no call has told yet that it was built.
_NEW = "new"
_NINJA = re.compile(r"^\s*\[(\d+)/(\d+)\]", re.M)  # pip indents what a build prints
_OUT_OF_MEMORY = re.compile(r"Killed signal terminated|\bKilled\b|virtual memory exhausted|std::bad_alloc|signal 9\b")


class BuildError(Exception):
    """Why it can't be built or installed; one sentence that says what to do."""


@dataclass(frozen=True)
class Setting:
    """Everything that a build depends on."""

    python: str
    python_version: str
    python_tag: str
    torch: str
    compute_capability: str
    nvcc: str
    cuda: str
    cuda_home: str
    jobs: int
    threads: int

    @property
    def architecture(self) -> str:
        return cuda_toolkit.architecture(self.compute_capability)


def run(params: Mapping[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """What the module kernel_build returns; `unfinished` where a job still runs after `patience` seconds."""
    try:
        return Build(params, check_mode).run()
    except (BuildError, SourceError) as error:
        return {"changed": False, "failed": True, "msg": masking.mask_text(str(error)), "progress": ""}


def job_counts(cores: int, available_mib: int | None) -> tuple[int, int]:
    """(compilers at once, threads of each): as many as memory and cores allow, one thread each.

    One architecture gives nvcc's own threads nothing to do, and each would take memory of its own.

    >>> job_counts(64, 512 * 1024), job_counts(128, 64 * 1024), job_counts(2, 1024)
    ((64, 1), (13, 1), (1, 1))
    """
    by_memory = int((available_mib or 0) * MEMORY_SHARE) // MIB_PER_JOB if available_mib else 1
    return max(1, min(cores, by_memory)), 1


class Build:
    """One call. `patience` 0 waits until the end (or the timeout)."""

    def __init__(self, params: Mapping[str, Any], check_mode: bool) -> None:
        self.params = params
        self.check_mode = check_mode
        self.deadline = Deadline(params["timeout"])
        self.patience = Deadline(params["patience"] or params["timeout"])
        self.root = params["build_folder"]
        self.extra = {name: str(value) for name, value in params["environment"].items()}
        self.known: dict[str, Any] = {}
        self.result: dict[str, Any] = {
            "changed": False,
            "failed": False,
            "unfinished": False,
            "progress": "",
            "built": False,
            "installed": False,
            "key": "",
            "wheel": "",
            "commit": "",
            "architecture": "",
            "needs_wheel": False,
            "dependencies": [],
            "log": "",
            "jobs": {},
        }

    # The whole

    def run(self) -> dict[str, Any]:
        self.known = python_packages.ask(
            self.params["python"],
            self.deadline.capped(30),
            (),
            self.extra.get("PYTHONPATH", ""),
            (self.params["package"],),
        )
        if self.known.get("error"):
            raise BuildError(f"{self.known['error']} Install SGLang first, or correct sglang_python.")
        if not self.params["source"]:
            return self._published()
        setting = self._setting()
        source = kernel_source.resolve(self.params["source"], self.params["source_ref"], self.deadline)
        key = kernel_source.cache_key(source.identity, self._facts(setting))
        self.result.update(key=key, commit=source.identity, architecture=f"sm_{setting.architecture}")
        self.result["jobs"] = {"compilers": setting.jobs, "threads": setting.threads}
        if self.params["state"] == "installed" and self._is_installed(key):
            return self._unchanged()
        wheel = self._kept_wheel(key)
        if not wheel:
            if self.check_mode:
                return self._predict(f"would build {source.identity[:12]} for sm_{setting.architecture}")
            if not self._build(source, setting, key):
                return self.result
            wheel = self._kept_wheel(key)
        self.result["wheel"] = wheel
        if self.params["state"] == "built":
            self._tell_built(key)
            self.result["msg"] = f"The wheel is {wheel}."
            return self.result
        return self._install(wheel, key)

    def _tell_built(self, key: str) -> None:
        """Say once that the wheel is new: an earlier call of this run may have built it."""
        with contextlib.suppress(OSError):
            os.unlink(f"{self.root}/wheels/{key}/{_NEW}")
            self.result.update(built=True, changed=True)

    def _published(self) -> dict[str, Any]:
        """No source: the wheel that is named (a file, or a requirement such as sglang-kernel==0.4.10), else what the
        installed SGLang requires."""
        wheel = self.params["wheel"] or self._required()
        if wheel.startswith("/"):
            key = self._wheel_key(wheel)
            if self._is_installed(key):
                self.result["key"] = key
                return self._unchanged()
            if not os.path.isfile(wheel):
                self.result.update(needs_wheel=True, key=key, msg=f"The wheel {wheel} is not on this host yet.")
                return self.result
        else:
            key = kernel_source.cache_key(wheel, {"python": self.known["tag"], "torch": self._torch()})
            self.result["key"] = key
            if self._is_installed(key):
                return self._unchanged()
            report = self._inspect()
            if report["usable"] and self._has(wheel):
                if not self.check_mode:
                    self._note(key, wheel, report)
                return self._unchanged()
            if not self._pip_command():
                return self._without_pip(wheel, report)
        self.result.update(key=key, wheel=wheel)
        if self.check_mode:
            return self._predict(f"would install {wheel}")
        return self._install(wheel, key)

    def _wheel_key(self, wheel: str) -> str:
        """The key that the build left in the path (.../wheels/<key>/<name>.whl), else one made of its name."""
        inner = re.search(r"/([0-9a-f]{16})/[^/]+\.whl$", wheel)
        return inner.group(1) if inner else kernel_source.cache_key(os.path.basename(wheel), {"torch": self._torch()})

    def _required(self) -> str:
        """What the metadata of the installed SGLang says: sglang-kernel==0.4.10, in older ones sgl-kernel==...."""
        if self.params["package"] == "sgl_kernel":
            found = python_packages.kernel_requirement(self.known["requires"])
            if found:
                return found
            sglang = self.known["versions"].get("sglang")
            why = f"SGLang {sglang} requires no kernel package" if sglang else "no metadata of SGLang is there to tell"
            raise BuildError(
                f"Which kernel package {self.params['python']} needs is not known ({why}): set sgl_kernel_wheel, for"
                " example to sglang-kernel==0.4.10, or sgl_kernel_source."
            )
        raise BuildError("Neither a source nor a wheel is named; set sgl_kernel_source or sgl_kernel_wheel.")

    def _has(self, requirement: str) -> bool:
        """Whether the package is there in this version; one with a local part (0.4.10+cu130) is of that version too."""
        name, _, version = requirement.partition("==")
        have = self.known["versions"].get(python_packages.normal(name), "")
        return bool(have) and version in ("", have, have.partition("+")[0])

    def _without_pip(self, requirement: str, report: Mapping[str, Any]) -> dict[str, Any]:
        """Nothing can be installed. What was not asked for by name but works is no reason to stop."""
        names = [name for name in python_packages.KERNEL_PACKAGES if name in self.known["versions"]]
        have = " and ".join(f"{name} {self.known['versions'][name]}" for name in names)
        if report["usable"] and not self.params["wheel"]:
            what = have or f"a {self.params['package']} that no package's metadata tells of"
            self.result.update(
                installed=True,
                check=report,
                msg=f"{what} works here and is left alone, though SGLang requires {requirement}: there is no pip to"
                " install it by.",
            )
            return self.result
        why = report["msg"] if have else f"{self.params['package']} is not installed."
        raise BuildError(f"{requirement} has to be installed, but {self._no_pip()} ({why})")

    def _unchanged(self) -> dict[str, Any]:
        self.result.update(installed=True, msg="The kernel package is installed as it should be; nothing was built.")
        return self.result

    def _predict(self, what: str) -> dict[str, Any]:
        self.result.update(changed=True, msg=f"{what[0].upper()}{what[1:]}.", predicted=True)
        return self.result

    # What it is built for

    def _torch(self) -> str:
        return str(self.known["torch"].get("version") or self.known["versions"].get("torch") or "")

    def _setting(self) -> Setting:
        number = self.params["compute_capability"]
        if not number:
            seen = readings.read(self.deadline.capped(20))
            number = next((gpu.compute_capability for gpu in seen.gpus if gpu.compute_capability), None) or ""
            if not number:
                why = (seen.error or "no GPU tells its compute capability").rstrip(".")
                raise BuildError(f"For which GPU to build is unknown ({why}); set sgl_kernel_compute_capability.")
        path = self.extra.get("PATH") or os.environ.get("PATH", "")
        nvcc = cuda_toolkit.find(self.deadline, self.extra, path, str(self.known.get("packages") or ""))
        if nvcc is None or not nvcc.version:
            why = f"{nvcc.path}: {nvcc.why}" if nvcc else "none was found"
            raise BuildError(f"There is no working CUDA compiler ({why}); install the CUDA toolkit, or set CUDA_HOME.")
        need = cuda_toolkit.first_cuda(number)
        if need and versions.older(nvcc.version, need):
            raise BuildError(
                f"{nvcc.path} is of CUDA {nvcc.version}, which can't compile for compute capability {number}; install "
                f"CUDA {need} or newer and set CUDA_HOME."
            )
        cores = host_facts.machine_facts()["cores"]
        jobs, threads = job_counts(cores, _available_mib())
        return Setting(
            python=self.params["python"],
            python_version=str(self.known["python"]),
            python_tag=str(self.known["tag"]),
            torch=self._torch(),
            compute_capability=number,
            nvcc=nvcc.path,
            cuda=nvcc.version,
            cuda_home=cuda_toolkit.home(nvcc.path, self.deadline),
            jobs=self.params["jobs"] or jobs,
            threads=self.params["compile_threads"] or threads,
        )

    def _facts(self, setting: Setting) -> dict[str, str | None]:
        options = json.dumps(self.params["cmake_options"], sort_keys=True, default=str)
        return {
            "cuda": versions.major_minor(setting.cuda),
            "torch": setting.torch,
            "python": setting.python_tag,
            "architecture": setting.architecture,
            "options": options,
            "folder": self.params["source_folder"],
        }

    # Wheels that are kept, and what is installed

    def _kept_wheel(self, key: str) -> str:
        found = sorted(glob.glob(f"{self.root}/wheels/{key}/*.whl"))
        return found[0] if found else ""

    def _installed_record(self) -> dict[str, Any]:
        try:
            with open(self._installed_path(), encoding="utf-8") as file:
                record = json.load(file)
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) else {}

    def _installed_path(self) -> str:
        name = hashlib.sha256(os.path.realpath(self.known["prefix"]).encode()).hexdigest()[:12]
        return f"{self.root}/installed/{self.params['package']}-{name}.json"

    def _is_installed(self, key: str) -> bool:
        """Whether what we installed under this key is untouched and was found to work with this torch."""
        record = self._installed_record()
        return (
            record.get("key") == key
            and record.get("usable") is True
            and record.get("torch") == self._torch()
            and record.get("files") == self._files_digest()
            and record.get("files") != ""
        )

    def _files_digest(self) -> str:
        """Digest of the installed package's file list and of its libraries' sizes; '' when it isn't installed."""
        folder = self.known.get("folders", {}).get(self.params["package"], "")
        if not folder or not os.path.isdir(folder):
            return ""
        total = hashlib.sha256()
        for path in kernel_source.files_of(folder):
            if not path.endswith(".pyc"):
                with contextlib.suppress(OSError):
                    facts = os.stat(os.path.join(folder, path))
                    total.update(f"{path}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
        return total.hexdigest()

    # Building

    def _build(self, source: Source, setting: Setting, key: str) -> bool:
        """True when the wheel is there; False while a job runs (told in the result)."""
        work = f"{self.root}/work/{key}"
        tree = f"{work}/source"
        with contextlib.suppress(FileExistsError):
            os.makedirs(f"{self.root}/wheels", mode=0o755)
        if not self._job(f"{work}/fetch", lambda: self._fetch_steps(source, tree), "fetching the source"):
            return False
        folder = kernel_source.package_folder(tree, self.params["source_folder"])
        wanted = kernel_source.dependencies(folder)
        self.result["dependencies"] = [
            {"name": one.name, "repository": one.repository, "tag": one.tag} for one in wanted
        ]
        options = self._cmake_options(setting, wanted)
        if not self._job(f"{work}/build", lambda: self._build_steps(folder, work, setting, options), "building"):
            return False
        self._keep(work, key, source, setting)
        return True

    def _job(self, folder: str, steps: Any, what: str) -> bool:
        now = job.status(folder)
        if now.state in ("absent", "gone", "failed"):
            if self.result.get("_begun") == folder:
                raise BuildError(f"The job in {folder} ended without a word; see {folder}/log.")
            job.start(folder, steps(), max(60.0, self.deadline.remaining()))
            self.result["_begun"] = folder
        now = job.wait(folder, min(self.patience.remaining(), self.deadline.remaining()))
        self.result["log"] = f"{folder}/log"
        if now.state == "done":
            self.result.pop("_begun", None)
            return True
        if now.state == "running":
            if self.deadline.expired():
                job.stop(folder)
                raise BuildError(f"The step {now.step} did not end within {self.params['timeout']:.0f} s.")
            self.result.pop("_begun", None)
            self.result.update(unfinished=True, progress=progress_line(what, now, job.log_tail(folder)))
            self.result["msg"] = self.result["progress"]
            return False
        raise BuildError(why_failed(now, job.log_tail(folder, 1 << 20), f"{folder}/log"))

    def _fetch_steps(self, source: Source, tree: str) -> list[job.Step]:
        shutil.rmtree(tree, ignore_errors=True)
        os.makedirs(tree, mode=0o755)
        environment = {**os.environ, **kernel_source.GIT_ENVIRONMENT, **self.extra}
        commands = kernel_source.fetch_command(source, tree, sys.executable)
        return [job.Step("fetch the source", command, environment) for command in commands]

    def _cmake_options(self, setting: Setting, wanted: Sequence[kernel_source.Dependency]) -> dict[str, str]:
        options = {
            "SGL_KERNEL_CUDA_ARCHS": setting.architecture,
            "SGL_KERNEL_COMPILE_THREADS": str(setting.threads),
            "CMAKE_CUDA_COMPILER": setting.nvcc,
        }
        if int(setting.compute_capability.split(".")[0]) >= 9:
            options["ENABLE_BELOW_SM90"] = "OFF"
        place = self.params["dependencies"]
        if place:
            variables, missing = kernel_source.local_dependencies(wanted, place)
            if missing and self.params["offline"]:
                listed = ", ".join(f"{one.name} ({one.repository} {one.tag[:12]})".strip() for one in missing)
                raise BuildError(f"The build is offline and {place} lacks {listed}; put each there as a folder.")
            options.update(variables)
        elif wanted and self.params["offline"]:
            listed = ", ".join(one.name for one in wanted)
            raise BuildError(
                f"The build is offline and needs {listed}; put them into a folder, sgl_kernel_dependencies."
            )
        if self.params["offline"]:
            options["FETCHCONTENT_FULLY_DISCONNECTED"] = "ON"
        options.update((str(name), str(value)) for name, value in self.params["cmake_options"].items())
        return options

    def _build_steps(self, folder: str, work: str, setting: Setting, options: Mapping[str, str]) -> list[job.Step]:
        tools, out = f"{self.root}/tools/{setting.python_tag}", f"{work}/wheels"
        shutil.rmtree(out, ignore_errors=True)
        os.makedirs(out, mode=0o755)
        pip = self._pip()
        steps = []
        environment = self._environment(setting, tools)
        if not self.params["build_isolation"] and not os.path.exists(f"{tools}/.complete"):
            shutil.rmtree(tools, ignore_errors=True)
            index = self._index_options()
            command = [*pip, "install", "--quiet", "--target", tools, *index, *TOOLS]
            steps.append(job.Step("install the build tools", command, {**os.environ, **self.extra}))
            mark = [sys.executable, "-c", "import sys; open(sys.argv[1], 'w').close()", f"{tools}/.complete"]
            steps.append(job.Step("install the build tools", mark, dict(os.environ)))
        command = [*pip, "wheel", "--verbose", "--no-deps", "--no-cache-dir", "--wheel-dir", out]
        command += [] if self.params["build_isolation"] else ["--no-build-isolation"]
        command += self._index_options()
        command += [f"--config-settings=cmake.define.{name}={value}" for name, value in options.items()]
        command.append(f"--config-settings=build-dir={work}/objects")
        steps.append(job.Step("compile", [*command, folder], environment, folder))
        return steps

    def _pip_command(self) -> list[str]:
        """pip of the server's Python; [] where it has none."""
        python = self.params["python"]
        environment = {**os.environ, **self.extra}
        if run_command([python, "-m", "pip", "--version"], self.deadline.capped(30), environment).returncode == 0:
            return [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
        return []

    def _pip(self) -> list[str]:
        command = self._pip_command()
        if not command:
            raise BuildError(f"{self._no_pip()}.")
        return command

    def _no_pip(self) -> str:
        python = self.params["python"]
        return f"{python} has no pip; install it: {python} -m ensurepip (or: uv pip install pip)"

    def _index_options(self) -> list[str]:
        options = ["--no-index"] if self.params["offline"] else []
        if self.params["wheels"]:
            options += ["--find-links", self.params["wheels"]]
        return options

    def _environment(self, setting: Setting, tools: str) -> dict[str, str]:
        path = self.extra.get("PATH") or os.environ.get("PATH", "/usr/local/bin:/usr/bin:/bin")
        front = [f"{tools}/bin", os.path.dirname(setting.python), f"{setting.cuda_home}/bin"]
        python_path = [tools, *filter(None, [self.extra.get("PYTHONPATH", "")])]
        major, _, minor = setting.compute_capability.partition(".")
        return {
            **os.environ,
            **self.extra,
            "PATH": ":".join([*front, path]),
            "PYTHONPATH": ":".join(python_path),
            "CUDA_HOME": setting.cuda_home,
            "CUDACXX": setting.nvcc,
            "TORCH_CUDA_ARCH_LIST": f"{major}.{minor}{'a' if int(major) >= 9 else ''}",
            "SGL_KERNEL_CUDA_ARCHS": setting.architecture,
            "SGL_KERNEL_COMPILE_THREADS": str(setting.threads),
            "MAX_JOBS": str(setting.jobs),
            "CMAKE_BUILD_PARALLEL_LEVEL": str(setting.jobs),
            "PYTHONDONTWRITEBYTECODE": "1",
            "NO_COLOR": "1",
        }

    def _keep(self, work: str, key: str, source: Source, setting: Setting) -> None:
        """Put the wheel under its key, whole or not at all, with what it was made of."""
        found = sorted(glob.glob(f"{work}/wheels/*.whl"))
        if len(found) != 1:
            raise BuildError(f"The build left {len(found)} wheels in {work}/wheels; one was expected.")
        if not any(name.endswith(".so") for name in zipfile.ZipFile(found[0]).namelist()):
            raise BuildError(f"The wheel {os.path.basename(found[0])} holds no compiled library; see {work}/build/log.")
        facts = {
            "key": key,
            "commit": source.identity,
            "source": kernel_source._shown(source.where),
            "ref": source.ref,
            "built": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **self._facts(setting),
        }
        passing = f"{self.root}/wheels/.{key}"
        shutil.rmtree(passing, ignore_errors=True)
        os.makedirs(passing, mode=0o755)
        os.replace(found[0], f"{passing}/{os.path.basename(found[0])}")
        write_private(f"{passing}/build.json", json.dumps(facts, indent=1))
        write_private(f"{passing}/{_NEW}", "")
        shutil.rmtree(f"{self.root}/wheels/{key}", ignore_errors=True)
        os.rename(passing, f"{self.root}/wheels/{key}")
        shutil.rmtree(work, ignore_errors=True)

    # Installing

    def _install(self, wheel: str, key: str) -> dict[str, Any]:
        if self.check_mode:
            return self._predict(f"would install {os.path.basename(wheel)}")
        folder = f"{self.root}/work/install-{os.path.basename(self._installed_path())[:-5]}"
        if not self._job(folder, lambda: self._install_steps(wheel), "installing"):
            return self.result
        shutil.rmtree(folder, ignore_errors=True)
        self.known = python_packages.ask(
            self.params["python"],
            self.deadline.capped(30),
            (),
            self.extra.get("PYTHONPATH", ""),
            (self.params["package"],),
        )
        report = self._inspect()
        self._tell_built(key)
        self.result.update(changed=True, installed=True, check=report)
        self._note(key, wheel, report)
        if not report["usable"]:
            self.result.update(failed=True, msg=f"The kernel package is installed but does not work. {report['msg']}")
        else:
            self.result["msg"] = f"{os.path.basename(wheel)} is installed and works."
        return self.result

    def _note(self, key: str, wheel: str, report: Mapping[str, Any]) -> None:
        """Remember what is installed, so that an unchanged host is not asked to import it again."""
        record = {
            "key": key,
            "wheel": os.path.basename(wheel),
            "torch": self._torch(),
            "usable": report["usable"],
            "files": self._files_digest(),
            "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        os.makedirs(f"{self.root}/installed", mode=0o755, exist_ok=True)
        write_private(self._installed_path(), json.dumps(record, indent=1))

    def _install_steps(self, wheel: str) -> list[job.Step]:
        pip, environment = self._pip(), {**os.environ, **self.extra}
        steps = []
        there = [name for name in python_packages.KERNEL_PACKAGES if name in self.known["versions"]]
        if self.params["package"] == "sgl_kernel" and there:
            # Both names install the same files: what stays would be half of one and half of the other.
            steps.append(job.Step("remove the old one", [*pip, "uninstall", "--yes", "--quiet", *there], environment))
        command = [*pip, "install", "--quiet", "--no-deps", "--force-reinstall", "--no-cache-dir"]
        index = [] if wheel.startswith("/") else self._index_options()
        steps.append(job.Step("install", [*command, *index, wheel], environment))
        return steps

    def _inspect(self) -> dict[str, Any]:
        number = self.params["compute_capability"]
        if not number:
            seen = readings.read(self.deadline.capped(20))
            number = next((gpu.compute_capability for gpu in seen.gpus if gpu.compute_capability), None) or ""
        return kernel_package.inspect(
            self.params["python"],
            self.params["package"],
            number,
            Deadline(120),
            self.params["cuobjdump"],
            self.extra,
        )


def _available_mib() -> int | None:
    facts = host_facts.memory_facts()
    known = [value for value in (facts["available_mib"], facts["limit_mib"]) if value]
    return min(known) if known else None


def progress_line(what: str, now: job.Status, log: str) -> str:
    """One line for people: '[37/412] compiled, 12 min, about 122 min left'."""
    minutes = now.seconds / 60
    taken = f"{now.seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min"
    steps = _NINJA.findall(log)
    if what != "building" or not steps:
        return f"{what} ({now.step or 'start'}), {taken}"
    done, total = int(steps[-1][0]), int(steps[-1][1])
    line = f"{what}: {done} of {total} compiled, {taken}"
    if 0 < done < total and now.step_seconds > 10:
        left = now.step_seconds / done * (total - done)
        line += f", about {left / 60:.0f} min left" if left >= 120 else f", about {left:.0f} s left"
    return line


def why_failed(now: job.Status, log: str, path: str) -> str:
    """One sentence on why a step failed, from its log."""
    if now.state == "gone":
        return f"The build's process was killed in its step {now.step or 'start'}; run the play again. Log: {path}"
    if now.code == 124:
        return f"The step {now.step} ran out of time; raise sgl_kernel_timeout. Log: {path}"
    if _OUT_OF_MEMORY.search(log):
        return f"A compiler was killed, which is how too little memory shows; lower sgl_kernel_jobs. Log: {path}"
    for pattern, cure in _BUILD_ERRORS:
        match = re.search(pattern, log, re.M)
        if match:
            return f"The step {now.step} failed: {match.group(0).strip()[:200]}. {cure} Log: {path}"
    lines = [line.strip() for line in log.splitlines() if line.strip() and not line.startswith("==")]
    telling = [line for line in lines if re.search(r"\berror\b|fatal|CMake Error|FAILED", line, re.I)]
    last = (telling[0] if telling else lines[-1] if lines else "it printed nothing")[:200]
    return f"The step {now.step} failed with status {now.code}: {last}. Log: {path}"


_BUILD_ERRORS = (
    (r"^fatal: (?:couldn't find remote ref|remote error|unable to access|repository).*", "Give a source that exists."),
    (r"Unsupported gpu architecture '[^']+'", "This nvcc is too old for the GPU: install CUDA 12.8 or newer."),
    (r"Failed to find nvcc|No CMAKE_CUDA_COMPILER could be found", "Install the CUDA toolkit, or set CUDA_HOME."),
    (r"Could NOT find CUDA\w*[^\n]*", "Install the CUDA toolkit with its libraries, or set CUDA_HOME."),
    (r"Could not find a package configuration file provided by \"Torch\"[^\n]*", "Install torch for this Python."),
    (r"No module named 'torch'", "Install torch for this Python."),
    (r"Python\.h: No such file or directory", "Install Python's headers (apt-get install python3-dev)."),
    (
        r"numa\.h: No such file or directory|cannot find -lnuma",
        "Install libnuma's headers: apt-get install libnuma-dev.",
    ),
    (r"Failed to clone repository[^\n]*|Could not resolve host[^\n]*", "Build offline with sgl_kernel_dependencies."),
    (r"ERROR: Could not find a version that satisfies the requirement [^\n(]*", "Put it into sgl_kernel_wheels."),
    (r"No space left on device", "Free space below sgl_kernel_build_folder."),
)
