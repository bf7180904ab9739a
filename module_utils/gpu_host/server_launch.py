"""Installs and starts one SGLang server: unit, environment file, config file of the key, records. Restarts it only when
something that it was started with has changed.

``planned`` looks and says what would have to be done and why; ``started`` does it; ``rolled_back`` does it with what
the last good deployment was; ``stopped`` stops the unit and clears the failure that SGLang's own SIGKILL leaves.
Everything is checked before the first file is written. Where there is no systemd (or we are not root) the server is a
detached process with a pid file, started as server_start does.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import re
import stat
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from . import (
    checkpoint,
    deployment,
    finding,
    installed_server,
    masking,
    server_http,
    server_record,
    server_start,
    server_state,
    server_unit,
    speculation,
)
from . import serving_command as commands
from .child import Completed, run_command
from .deadline import Deadline
from .deployment import Deployment
from .managers import NEVER_STOPPED
from .nvml import Reader
from .ports import port_holders
from .procfs import Proc
from .readings import Gpu, Readings, UnknownGpu, select
from .server_record import ServerRecord
from .server_start import CannotStart
from .storage import StorageError, private_folder, replace_file, safe_name

LOOK_SECONDS = 15.0  # longest look at GPUs and servers
COMMAND_SECONDS = 15.0
STOP_MARGIN = 15.0  # seconds that a stop may take beyond its grace
KEPT_BACKUPS = 20
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Files of a model whose change asks for a restart; the weights are told by the folder that a link leads to.
_MODEL_FILES = ("config.json", "model.safetensors.index.json")


class Refused(Exception):
    """Nothing was changed; the text is one sentence."""


@dataclass(frozen=True)
class Wanted:
    """What is to run: the deployment with its texts, and what is not kept in it."""

    deployment: Deployment
    config: str = ""  # text of the config file that holds the key
    config_path: str = ""
    gpus: tuple[str, ...] = ()

    @property
    def record(self) -> ServerRecord:
        one = self.deployment
        return ServerRecord(
            name=one.name,
            unit=one.unit,
            argv=one.argv,
            exe=one.argv[0],
            cwd=one.folder,
            environment=dict(one.environment),
            environment_file=one.environment_file,
            gpu_uuids=one.gpu_uuids,
            port=one.port,
            log=one.log,
            versions=dict(one.versions),
            uid=pwd.getpwnam(one.user).pw_uid,
            who=one.who,
            when=one.when,
        )


def run(params: Mapping[str, Any], check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """The module server_launch: ``params`` are those of library/server_launch.py."""
    began = time.monotonic()
    launch = Launch(params, check_mode)
    try:
        launch.run()
    except (Refused, UnknownGpu) as reason:
        launch.result.update(failed=True, refused=True, msg=f"Nothing was done. {reason}")
    except (CannotStart, StorageError, OSError) as reason:
        launch.result.update(failed=True, msg=str(reason))
    launch.result["seconds"] = round(time.monotonic() - began, 2)
    if diff:
        launch.result["diff"] = launch.differences
    return launch.result


class Launch:
    """One call. ``result`` is what the module returns, ``differences`` its diff."""

    def __init__(self, params: Mapping[str, Any], check_mode: bool, proc: Proc | None = None) -> None:
        self._params = params
        self._check = check_mode
        self._proc = proc or Proc()
        self._name: str = params["name"]
        self._systemd = os.geteuid() == 0 and os.path.isdir(server_start.SYSTEMD)
        self._user: str = params["user"] or pwd.getpwuid(os.geteuid()).pw_name
        self.differences: list[dict[str, str]] = []
        self.result: dict[str, Any] = {
            "changed": False,
            "name": self._name,
            "needed": False,
            "restarted": False,
            "reasons": [],
            "state": "",
            "pid": None,
            "unit": "",
            "port": params["port"],
            "log": "",
            "command": [],
            "gpus": [],
            "speculation": {},
            "files": [],
        }

    # ---- the four states ----

    def run(self) -> None:
        state = self._params["state"]
        if state == "stopped":
            self._stop_only()
            return
        readings = self._read_gpus()
        wanted = self._good() if state == "rolled_back" else self._wanted(readings)
        one = wanted.deployment
        self.result.update(
            unit=one.unit,
            port=one.port,
            log=one.log,
            command=list(masking.mask_argv(one.argv)),
            gpus=list(one.gpu_uuids),
            speculation=one.speculation,
        )
        changes = self._changes(wanted)
        servers = self._servers(readings)
        own = next((server for server in servers if server.name == self._name), None)
        self.result["state"] = own.state if own else "absent"
        present = deployment.load(self._params["state_folder"], self._name)
        reasons = why(one, present, own, [path for path in sorted(changes) if not _beside(path)])
        in_the_way = self._in_the_way(servers, wanted, bool(reasons))
        self.result.update(needed=bool(reasons), reasons=[*reasons, *in_the_way])
        for path, (before, after) in changes.items():
            self._note_difference(path, before, after)
        if not reasons:
            self.result.update(pid=own.main_pid if own else None, changed=bool(changes) and state != "planned")
            self.result["msg"] = f"{self._name} runs as it should (pid {self.result['pid']}) and is left alone."
            if changes and state != "planned" and not self._check:
                self._write_files(wanted, changes)
            return
        if state == "planned":
            self.result["msg"] = f"{self._name} has to be started: {'; '.join(self.result['reasons'])}."
            return
        self.result["changed"] = True
        if self._check:
            self.result["msg"] = f"{self._name} would be started: {'; '.join(self.result['reasons'])}."
            return
        if in_the_way:
            raise Refused(f"{in_the_way[0]}: reset the host first, as playbooks/deploy-*.yml do.")
        self._apply(wanted, changes, own)

    def _stop_only(self) -> None:
        unit = self._unit_facts(self._unit_name)
        running = unit.get("ActiveState") in ("active", "activating", "reloading", "deactivating")
        self.result.update(unit=self._unit_name, changed=running)
        self.result["msg"] = f"{self._name} did not run." if not running else f"{self._name} was stopped."
        if self._check:
            return
        if running:
            self._stop()
        elif unit.get("ActiveState") == "failed":
            self._systemctl("reset-failed", self._unit_name)

    # ---- what is to run ----

    @property
    def _unit_name(self) -> str:
        return f"{self._name}.service" if self._systemd else ""

    def _wanted(self, readings: Readings) -> Wanted:
        """Everything rendered; Refused with one sentence for each thing that is wrong."""
        params = self._params
        safe_name(self._name, "server name")
        try:
            pwd.getpwnam(self._user)
        except KeyError:
            raise Refused(
                f"There is no user {self._user} on this host: create it, or change server_launch_user."
            ) from None
        gpus = select(readings, params["gpus"]) if params["gpus"] or readings.gpus else []
        serving = commands.Serving(
            python=params["python"],
            model_path=params["model_path"],
            drafter_path=params["drafter_path"],
            host=params["host"],
            port=params["port"],
            api_key=params["api_key"] or _key_of(params["api_key_file"], self._user),
            arguments=params["arguments"],
            speculation={name: value for name, value in params["speculation"].items() if value not in (None, "")},
            nodes=params["nodes"],
            node_rank=params["node_rank"],
            dist_init_addr=params["dist_init_addr"],
        )
        variables = self._variables(gpus)
        found = [*self._place_problems(serving), *_variable_problems(params["environment"], bool(params["gpus"]))]
        installed = installed_server.Installed()
        if not found:
            installed = installed_server.look(params["python"], variables, self._user)
            found += [installed.trouble] if installed.trouble else []
        found += commands.problems(serving, commands.known_options(installed.package))
        found += self._speculation_problems(serving, gpus, installed.versions.get("sglang", ""))
        if found:
            raise Refused(" ".join(found))
        config_path = os.path.join(params["config_folder"], f"{self._name}.yaml")
        argv = commands.argv(serving, config_path)
        environment_path = os.path.join(params["config_folder"], f"{self._name}.env")
        log = os.path.join(params["log_folder"], f"{self._name}.log")
        folder = params["working_folder"] or _home(self._user)
        plan = server_unit.UnitPlan(
            name=self._name,
            command=argv,
            environment_files=[environment_path, *([params["environment_file"]] if params["environment_file"] else [])],
            log=log,
            user=self._user,
            folder=folder,
            grace=params["grace"],
            restart=params["restart"],
            restart_seconds=params["restart_seconds"],
            burst=params["restart_burst"],
            load_seconds=params["load_seconds"],
            journal=params["journal"],
        )
        files = {environment_path: server_unit.environment_text(variables)}
        if self._systemd:
            files[os.path.join(params["unit_folder"], self._unit_name)] = server_unit.unit(plan)
            if params["journal"]:
                journal = os.path.join(params["unit_folder"], f"{self._name}-journal.service")
                files[journal] = server_unit.journal_unit(plan)
            if params["logrotate_folder"] and os.path.isdir(params["logrotate_folder"]):
                files[os.path.join(params["logrotate_folder"], f"sglang-{self._name}")] = server_unit.logrotate(plan)
        profile = _text(params["environment_file"]) if params["environment_file"] else None
        if profile is not None:
            files[params["environment_file"]] = profile  # so that a rollback brings back that one too
        uuids = tuple(gpu.uuid for gpu in gpus)
        one = Deployment(
            name=self._name,
            argv=argv,
            unit=self._unit_name,
            port=params["port"],
            gpu_uuids=uuids,
            log=log,
            user=self._user,
            folder=folder,
            files=files,
            environment=variables,
            environment_file=params["environment_file"],
            speculation=dict(serving.speculation),
            inputs=self._inputs(installed),
            versions=installed.versions,
            commit=installed.commit,
            who=params["who"],
        )
        return Wanted(one, commands.config_text(serving), config_path, uuids)

    def _good(self) -> Wanted:
        """The last good deployment, as it was. Its key is what the config file holds now."""
        good = deployment.load(self._params["state_folder"], self._name, good=True)
        if good is None:
            raise Refused(f"There is no good deployment of {self._name} on this host to go back to.")
        path = os.path.join(self._params["config_folder"], f"{self._name}.yaml")
        return Wanted(replace(good, who=self._params["who"]), _text(path) or "", path, good.gpu_uuids)

    def _variables(self, gpus: Sequence[Gpu]) -> dict[str, str]:
        """The server's own environment, besides the file of the NCCL profile."""
        params = self._params
        found = {
            # Ninja and other tools of the JIT compilers lie beside the interpreter.
            "PATH": f"{os.path.dirname(params['python'])}:/usr/local/cuda/bin:{DEFAULT_PATH}",
            "SPT_NOENV": "1",  # setproctitle then leaves the workers' environments readable
        }
        if params["gpus"]:
            # By number, since SGLang's all-reduce reads numbers here; in this order CUDA's are NVML's.
            found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
            found["CUDA_VISIBLE_DEVICES"] = ",".join(str(gpu.index) for gpu in gpus)
        found.update({name: _plain(value) for name, value in params["environment"].items()})
        return found

    def _place_problems(self, serving: commands.Serving) -> list[str]:
        """What is missing on this host."""
        params = self._params
        found = []
        if not os.access(params["python"], os.X_OK):
            found.append(f"sglang_python: there is no program {params['python']} on this host; install SGLang there.")
        if NEVER_STOPPED.match(f"{self._name}.service") or self._foreign_unit():
            found.append(f"sglang_server_name: {self._name}.service is a unit of something else; choose another name.")
        if params["environment_file"] and not self._check and not os.path.isfile(params["environment_file"]):
            found.append(
                f"The environment file {params['environment_file']} is not there; the role nccl_env writes it."
            )
        if not self._check:
            speculates = bool(serving.speculation.get("algorithm")) and bool(serving.drafter_path)
            folders = {"sglang_model_path": serving.model_path}
            folders.update({"sglang_drafter_path": serving.drafter_path} if speculates else {})
            found += [problem for name, path in folders.items() if (problem := _model_problem(name, path))]
        if params["api_key"] and params["api_key_file"]:
            found.append("sglang_api_key and sglang_api_key_file are both set; give one of them.")
        return found

    def _speculation_problems(self, serving: commands.Serving, gpus: Sequence[Gpu], version: str) -> list[str]:
        """Speculation, parallel sizes and attention backends, against the models' configs and these GPUs."""
        nodes = {"nnodes": serving.nodes} if serving.nodes > 1 else {}
        found = speculation.judge(
            serving.speculation,
            {**serving.arguments, **nodes},
            serving.drafter_path,
            speculation.models(_config(serving.model_path), _config(serving.drafter_path)),
            speculation.Host((gpus[0].compute_capability or "") if gpus else "", version, len(gpus)),
        )
        return [one.sentence for one in finding.errors(found)]

    def _foreign_unit(self) -> bool:
        path = self._unit_facts(self._unit_name).get("FragmentPath", "") if self._systemd else ""
        return bool(path) and not path.startswith((self._params["unit_folder"] + "/", "/run/systemd/transient/"))

    def _inputs(self, installed: installed_server.Installed) -> dict[str, str]:
        """What the server depends on besides the rendered files; another value asks for a restart."""
        params = self._params
        found = {f"version of {name}": version for name, version in installed.versions.items()}
        if installed.commit:
            found["commit of sglang"] = installed.commit
        for folder in filter(None, (params["model_path"], params["drafter_path"] if params["speculation"] else "")):
            found[folder] = os.path.realpath(folder)
            for name in _MODEL_FILES:
                found[os.path.join(folder, name)] = _digest(os.path.join(folder, name))
        for path in (params["environment_file"], *params["watch_files"]):
            if path:
                found[path] = _digest(path)
        return {name: value for name, value in found.items() if value}

    # ---- what is there ----

    def _read_gpus(self) -> Readings:
        reader = Reader()
        try:
            return reader.read(Deadline(LOOK_SECONDS / 2))
        finally:
            reader.close()

    def _servers(self, readings: Readings) -> Sequence[server_state.ServerState]:
        deadline = Deadline(LOOK_SECONDS)
        return server_state.observe_for(self._params, deadline, readings=readings, proc=self._proc).servers

    def _in_the_way(self, servers: Sequence[server_state.ServerState], wanted: Wanted, starting: bool) -> list[str]:
        """What has to go before the server can start. Refused where it is not ours to end."""
        if not starting:
            return []
        found: list[str] = []
        ours: set[int] = set()
        deployed = set(deployment.names(self._params["state_folder"]))
        for server in servers:
            ours.update(server.pids)
            if server.name == self._name or not server.pids:
                continue
            other = deployment.load(self._params["state_folder"], server.name) if server.name in deployed else None
            # One that has taken no GPU yet is known by its deployment alone.
            gpus = set(server.gpus) or set(other.gpu_uuids if other else ())
            if wanted.gpus and gpus and not set(wanted.gpus) & gpus:
                continue
            if other is not None and not self._params["replaces_others"]:
                raise Refused(
                    f"The server {server.name}, deployed on this host, runs on the same GPUs: give each its own"
                    " sglang_gpus, or stop that one first."
                )
            found.append(f"the server {server.name} (pid {server.main_pid or server.pids[0]}) runs on the same GPUs")
        ports = {wanted.deployment.port: "sglang_port", **_meeting_port(wanted.deployment.argv)}
        for holder in port_holders(self._proc, list(ports)):
            if holder["pid"] not in ours:
                who = masking.mask_text(holder["name"]) + (f" (pid {holder['pid']})" if holder["pid"] else "")
                variable = ports[holder["port"]]
                raise Refused(f"Port {holder['port']} is in use by {who}: end that, or choose another {variable}.")
        return found

    def _changes(self, wanted: Wanted) -> dict[str, tuple[str, str]]:
        """Text before and after of each file that differs."""
        texts = dict(wanted.deployment.files)
        if wanted.config or os.path.exists(wanted.config_path):
            texts[wanted.config_path] = wanted.config
        return {path: (before, text) for path, text in texts.items() if (before := _text(path) or "") != text}

    def _note_difference(self, path: str, before: str, after: str) -> None:
        self.result["files"].append(path)
        texts = [masking.mask_text(text) for text in (before, after)]
        if texts[0] == texts[1] and before != after:
            texts[1] += "# (a secret value differs)\n"
        self.differences.append({"before_header": path, "after_header": path, "before": texts[0], "after": texts[1]})

    # ---- doing it ----

    def _apply(
        self, wanted: Wanted, changes: Mapping[str, tuple[str, str]], own: server_state.ServerState | None
    ) -> None:
        params, state_folder = self._params, self._params["state_folder"]
        self._end_old(own)
        one = replace(
            self._compared(wanted.deployment),
            when=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            verdict="",
        )
        one = replace(one, log_from=self._open_log(one.log, pwd.getpwnam(one.user).pw_uid))
        self._write_files(wanted, changes)
        deployment.save(one, state_folder)
        server_record.save(replace(wanted.record, when=one.when), state_folder)
        if self._systemd:
            self._enable()
        started = server_start.Start(
            {
                "name": self._name,
                "state_folder": state_folder,
                "wait": False,
                "grace": params["grace"],
                "timeout": 60.0,
            },
            Deadline(60.0),
            self._proc,
        ).run(check_mode=False)
        self.result.update(pid=started["pid"] or None, restarted=True)
        self.result["msg"] = f"{self._name} was started (pid {started['pid']}): {'; '.join(self.result['reasons'])}."

    def _write_files(self, wanted: Wanted, changes: Mapping[str, tuple[str, str]]) -> None:
        """Write what differs, and tell systemd only when a unit does: a reload takes GPUs from running containers."""
        uid = pwd.getpwnam(wanted.deployment.user).pw_uid if os.geteuid() == 0 else -1
        for path, (before, after) in changes.items():
            self._back_up(path, before)
            os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
            if path == wanted.config_path:
                replace_file(path, after, 0o600, uid) if after else os.unlink(path)
            else:
                replace_file(path, after, 0o600 if path.endswith(".env") else 0o644)
        if self._systemd and any(path.startswith(self._params["unit_folder"] + "/") for path in changes):
            self._systemctl("daemon-reload")

    def _end_old(self, own: server_state.ServerState | None) -> None:
        """Stop our own unit; a server that runs outside of it is left to a reset, which knows how to end it."""
        if self._systemd and self._unit_facts(self._unit_name).get("ActiveState") not in ("inactive", "failed", None):
            self._stop()
            return
        if own is not None and own.pids:
            raise Refused(
                f"{self._name} runs outside of its unit (pid {own.main_pid or own.pids[0]}): reset the host first, as"
                " playbooks/deploy-*.yml do."
            )

    def _stop(self) -> None:
        # systemd waits once for TERM, once for KILL, and once more for what is left of the control group.
        deadline = Deadline(3 * self._params["grace"] + STOP_MARGIN)
        answer = run_command(["systemctl", "--no-ask-password", "stop", self._unit_name], deadline)
        if answer.returncode != 0:
            raise CannotStart(
                f"{self._unit_name} did not stop ({(answer.stderr or answer.trouble).strip()}): reset the host, then"
                " deploy again."
            )
        # SGLang's main process ends itself by SIGKILL: a stop that was asked for reads as a failure.
        self._systemctl("reset-failed", self._unit_name)

    def _compared(self, one: Deployment) -> Deployment:
        """With what only a start has the time to find: files changed since they were installed."""
        installed = installed_server.look(one.argv[0], dict(one.environment), one.user, compare=True)
        if installed.trouble:
            return one
        return replace(
            one, versions=installed.versions, local_changes=installed.changed, sitecustomize=installed.sitecustomize
        )

    def _back_up(self, path: str, text: str) -> None:
        if not text:
            return
        folder = private_folder(
            os.path.join(private_folder(deployment.folder(self._params["state_folder"])), "backups")
        )
        moment = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%SZ")
        replace_file(os.path.join(folder, f"{os.path.basename(path)}.{moment}"), text, 0o600)
        kept = sorted(os.listdir(folder), key=lambda name: os.stat(os.path.join(folder, name)).st_mtime, reverse=True)
        for name in kept[KEPT_BACKUPS:]:
            os.unlink(os.path.join(folder, name))

    def _open_log(self, path: str, uid: int) -> int:
        """Make the log file readable by its owner alone, since SGLang prints its key there; its size (bytes)."""
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(number, 0o600)
            if os.geteuid() == 0:
                os.fchown(number, uid, -1)
            return os.fstat(number).st_size
        finally:
            os.close(number)

    def _enable(self) -> None:
        link = os.path.join(self._params["unit_folder"], "multi-user.target.wants", self._unit_name)
        if os.path.lexists(link) != self._params["enabled"]:
            self._systemctl("--no-reload", "enable" if self._params["enabled"] else "disable", self._unit_name)

    def _systemctl(self, *words: str) -> Completed:
        answer = run_command(["systemctl", *words], Deadline(COMMAND_SECONDS))
        if answer.returncode != 0 and "reset-failed" not in words:
            said = masking.mask_text((answer.stderr or answer.trouble).strip())
            raise CannotStart(f"systemctl {' '.join(words)} failed: {said}.")
        return answer

    def _unit_facts(self, name: str) -> dict[str, str]:
        if not name:
            return {}
        answer = run_command(["systemctl", "show", name, "-p", "ActiveState,FragmentPath"], Deadline(COMMAND_SECONDS))
        return dict(line.split("=", 1) for line in answer.stdout.splitlines() if "=" in line)


def _meeting_port(argv: Sequence[str]) -> dict[int, str]:
    """The port at which the ranks of several hosts meet, with its variable; the first host alone listens there."""
    port = server_http.option(argv, "--dist-init-addr").rpartition(":")[2]
    first = server_http.option(argv, "--node-rank") == "0"
    return {int(port): "sglang_dist_init_addr"} if first and port.isdigit() else {}


def _beside(path: str) -> bool:
    """Files that a running server does not depend on."""
    return path.endswith("-journal.service") or "/logrotate.d/" in path


def why(
    wanted: Deployment, present: Deployment | None, own: server_state.ServerState | None, changed_files: Sequence[str]
) -> list[str]:
    """Why the server has to be (re)started, one clause each; nothing where it runs as it should."""
    found = []
    if own is None or own.state == "absent":
        found.append("it does not run")
    elif own.state in ("hung", "zombie"):
        found.append(f"it is a {own.state} server" if own.state == "zombie" else "it is hung")
    if present is not None and present.verdict.startswith("stuck"):
        found.append("its last start got stuck")
    if present is None:
        return [*found, "it was not deployed by this role before"]
    if present.argv != wanted.argv:
        found.append("its command line changes")
    # The command line is most of a unit's text.
    found += [
        f"{path} changes" for path in changed_files if not path.endswith(".service") or present.argv == wanted.argv
    ]
    names = sorted(set(present.inputs) | set(wanted.inputs))
    found += [
        f"{name} changed from {present.inputs.get(name, 'nothing')} to {wanted.inputs.get(name, 'nothing')}"
        if name.startswith(("version of", "commit of"))
        else f"{name} changed"
        for name in names
        if present.inputs.get(name) != wanted.inputs.get(name)
    ]
    return list(dict.fromkeys(found))


def _key_of(path: str, user: str) -> str:
    """The key in this file of the host, which nobody else may read."""
    if not path:
        return ""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise Refused(f"sglang_api_key_file: {path} can't be read on this host: {error.strerror}.") from None
    with os.fdopen(number, "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode) or facts.st_mode & 0o077:
            raise Refused(
                f"sglang_api_key_file: {path} has mode {stat.S_IMODE(facts.st_mode):04o}, others may read the key: type"
                f" chmod 600 {path}."
            )
        if facts.st_uid not in (0, os.geteuid(), pwd.getpwnam(user).pw_uid):
            raise Refused(f"sglang_api_key_file: {path} belongs to uid {facts.st_uid}, neither to root nor to {user}.")
        key = file.read(4096).decode("utf-8", "replace").strip()
    if not key:
        raise Refused(f"sglang_api_key_file: {path} is empty.")
    return key


def _model_problem(variable: str, path: str) -> str:
    """What keeps this folder from being a model, at a glance; model_staging looks at every shard."""
    if not os.path.isabs(path):
        return f"{variable}: {path!r} is no folder of this host; give an absolute path."
    if not os.path.isdir(path):
        return f"{variable}: there is no model in {path} on this host; stage it first."
    try:
        checkpoint.read_config(path)
    except checkpoint.CheckpointError as error:
        return f"{variable}: {error}"
    return ""


def _config(folder: str) -> dict[str, Any] | None:
    try:
        return checkpoint.read_config(folder) if folder else None
    except checkpoint.CheckpointError:
        return None


def _variable_problems(environment: Mapping[str, Any], gpus_chosen: bool) -> list[str]:
    found = []
    for name, value in environment.items():
        if not _VARIABLE.fullmatch(name):
            found.append(f"sglang_environment: {name!r} is no name of a variable; use letters, digits and underscores.")
        elif isinstance(value, (dict, list)) or "\n" in str(value) or "\0" in str(value):
            found.append(f"sglang_environment: {name} has no plain value of one line.")
        elif name == "CUDA_VISIBLE_DEVICES" and gpus_chosen:
            found.append("sglang_environment: CUDA_VISIBLE_DEVICES is set by sglang_gpus; take it out.")
    return found


def _plain(value: Any) -> str:
    """A YAML value as a variable has it: true is 1."""
    return str(int(value)) if isinstance(value, bool) else str(value)


def _home(user: str) -> str:
    home = pwd.getpwnam(user).pw_dir
    return home if os.path.isdir(home) else "/"


def _text(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read(1 << 20)
    except OSError:
        return None


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read(64 << 20)).hexdigest()
    except OSError:
        return ""
