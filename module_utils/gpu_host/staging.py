"""Brings models to a host: looks, refuses early, starts the worker, follows it for a while.

``run`` is called again and again with the same parameters, each time for `patience` seconds, until it has finished: a
model that is staged for an hour is watched by short calls, and a connection that breaks costs a call, not the work. The
worker (staging_worker) does the work. `task` tells the calls of one task from those of the next.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from . import staging_place, staging_sources, staging_worker
from .deadline import Deadline
from .staging_place import Found, Model
from .staging_sources import HOST, HUB, PATH, RCLONE, RSYNC, Listing, Source, SourceError
from .staging_worker import DONE, FAILED, SEEDING, Job
from .storage import StorageError, private_folder, write_private

_FOLLOW_SECONDS = 0.2
_STOP_SECONDS = 30.0
# A worker that dies without a word is started so many times by one task.
_STARTS = 4
_MIB = 1 << 20


class Refused(Exception):
    """Nothing was changed; the text is one sentence that says why and what to do."""


def run(params: Mapping[str, Any], *, check_mode: bool = False, diff: bool = False) -> dict[str, Any]:
    """What the module `model_staging` returns."""
    try:
        call = _Call(params, check_mode, diff)
        return {"look": call.look, "stage": call.stage, "seed": call.seed, "stop": call.stop}[params["phase"]]()
    except (Refused, SourceError, StorageError) as error:
        return {"changed": False, "failed": True, "refused": True, "msg": str(error)}


def human(count: float) -> str:
    """Bytes for people."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / _MIB:.1f} MiB"


def progress_line(path: str, status: Mapping[str, Any]) -> str:
    """One line for people: phase, percent, bytes, rate, time left."""
    words = [str(status.get("phase") or "starting")]
    total, done, rate = (int(status.get(name) or 0) for name in ("total_bytes", "bytes", "rate"))
    if total:
        words.append(f"{100 * done / total:.1f} % of {human(total)}")
    if rate:
        words.append(f"{human(rate)}/s")
        left = float(status.get("seconds_left") or 0)
        words.append(f"{left // 60:.0f} min {left % 60:.0f} s left")
    if status.get("peers") is not None:
        words.append(f"{status['peers']} peers")
    if status.get("attempt", 1) > 1:
        words.append(f"attempt {status['attempt']}")
    words.append(f"{float(status.get('seconds') or 0):.0f} s so far")
    return f"{os.path.basename(path)}: {', '.join(words)}" + (f" ({status['msg']})" if status.get("msg") else "")


def _without_torrent(swarm: Mapping[str, Any] | None) -> dict[str, Any]:
    """The worker has the torrent as a file, and the listing as its own."""
    return {name: value for name, value in (swarm or {}).items() if name not in ("torrent", "listing")}


@dataclass(frozen=True)
class _Plan:
    """`fetch` bytes are still to come, `need` bytes of space they take beyond what is freed before. With `nothing` no
    file is to be fetched, with `adopt` the record alone is to be written. `pythons` by the worker's names for them."""

    listing: Listing
    staging: str
    fetch: int = 0
    need: int = 0
    nothing: bool = False
    adopt: bool = False
    pythons: Mapping[str, str] = field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        return {"need_bytes": self.fetch, "files": len(self.listing.files), "left_out": list(self.listing.left_out)}


class _Call:
    def __init__(self, params: Mapping[str, Any], check_mode: bool, diff: bool) -> None:
        self.params = params
        self.task = params["task"] or secrets.token_hex(6)
        self.check_mode = check_mode
        self.diff = diff
        self.models = [
            Model(os.path.normpath(one["path"]), one.get("source") or "", one.get("tokenizer", True))
            for one in params["models"]
        ]
        self.sources = {model.path: staging_sources.parse(model.source) for model in self.models}

    def job(self, model: Model) -> Job:
        name = hashlib.sha256(model.path.encode()).hexdigest()[:12]
        folder = os.path.join(self.params["state_folder"], "staging", f"{name}-{os.path.basename(model.path)[:40]}")
        private_folder(self.params["state_folder"])
        private_folder(os.path.dirname(folder))
        return Job(private_folder(folder))

    # Look

    def found(self, model: Model) -> Found:
        """What is there. Refused: nothing, and no source to bring it from."""
        found = staging_place.look(model)
        if not model.source and found.state != staging_place.PRESENT:
            raise Refused(f"{found.reason} Correct the path, or give the model a source to bring it from.")
        return found

    def _is_there(self, model: Model, found: Found) -> bool:
        return found.state == staging_place.PRESENT and (
            not self.params["refresh"] or self.task in self._followers(self.job(model))
        )

    def look(self) -> dict[str, Any]:
        rows, needs = [], set()
        for model in self.models:
            found = self.found(model)
            rows.append(self._row(model, found))
            if self._is_there(model, found):
                continue
            if self.sources[model.path].kind == HUB and not self._has("huggingface_hub"):
                needs.add("huggingface_hub")
            if (self.params["fan_out"] or self.sources[model.path].kind == HOST) and not self._has("libtorrent"):
                needs.add("libtorrent")
        missing = [row["path"] for row in rows if row["state"] != staging_place.PRESENT]
        if self.params["refresh"]:
            missing = [model.path for model in self.models if model.source]
        return {
            "changed": False,
            "finished": True,
            "models": rows,
            "missing": missing,
            "needs": sorted(needs),
            "msg": "",
        }

    def _has(self, module: str) -> bool:
        try:
            staging_sources.python_with(module, self.params["pythons"])
        except SourceError:
            return False
        return True

    @staticmethod
    def _row(model: Model, found: Found, **more: Any) -> dict[str, Any]:
        commit = (found.record or {}).get("commit", "")
        return {
            "path": model.path, "source": model.source, "state": found.state, "reason": found.reason, "commit": commit,
            "bytes": found.bytes, **more,
        }  # fmt: skip

    # Stage

    def stage(self) -> dict[str, Any]:
        """Follow the staging of the first model that is not there yet; start it where nobody does."""
        deadline = Deadline(self.params["patience"] or self.params["timeout"])
        rows: list[dict[str, Any]] = []
        adopted: list[str] = []
        plans: dict[str, _Plan] | None = None
        for number, model in enumerate(self.models):
            found = self.found(model)
            if self._is_there(model, found):
                rows.append(self._row(model, found, **self._outcome(model)))
                continue
            if plans is None:
                plans = self._plans([one for one in self.models[number:] if self._is_to_be_planned(one)])
            plan = plans.get(model.path)
            if plan is not None and plan.nothing:
                adopted += [model.path] if plan.adopt else []
                if plan.adopt and not self.check_mode:
                    self._adopt(model, plan)
                    found = self.found(model)
                rows.append(self._row(model, found))
            elif self.check_mode:
                assert plan is not None
                rows.append(self._row(model, found, **plan.row()))
            else:
                outcome = self._follow(model, plan, deadline)
                if outcome is not None:
                    return outcome
                rows.append(self._row(model, self.found(model), **self._outcome(model)))
        return self._finished(rows, adopted)

    def _is_to_be_planned(self, model: Model) -> bool:
        if self._is_there(model, self.found(model)):
            return False
        return self.check_mode or (not self._lives(model) and self.task not in self._followers(self.job(model)))

    def _finished(self, rows: list[dict[str, Any]], adopted: list[str]) -> dict[str, Any]:
        coming = [row for row in rows if "need_bytes" in row]
        staged = [row["path"] for row in [*coming, *(row for row in rows if row.get("seconds"))]]
        texts = [
            f"{row['path']} would be staged from {row['source']}: {human(row['need_bytes'])} to fetch, "
            f"{row['files']} files."
            if row["files"]
            else f"{row['path']} would be taken from other hosts."
            for row in coming
        ]
        texts += [f"{path} is what its source holds; only its record is written." for path in adopted]
        result: dict[str, Any] = {
            "changed": bool(staged or adopted), "models": rows, "staged": staged, "missing": [], "msg": " ".join(texts),
        }  # fmt: skip
        if self.check_mode:
            result["predicted"] = True
        if self.diff and (staged or adopted):
            before = "".join(f"{row['path']}: {row.get('was') or row['state']}\n" for row in rows)
            after = "".join(f"{row['path']}: {row['source'] or 'as it is'}\n" for row in rows)
            result["diff"] = {"before": before, "after": after, "before_header": "models", "after_header": "models"}
        return result

    def _outcome(self, model: Model) -> dict[str, Any]:
        """What is known of a model that was brought while this task followed."""
        if self.check_mode or self.task not in self._followers(self.job(model)):
            return {}
        status = self.job(model).read_status()
        return {name: status[name] for name in ("seconds", "sent_bytes", "pieces_refused", "was") if name in status}

    @staticmethod
    def _followers(job: Job) -> dict[str, int]:
        """The tasks that follow the job, each with how often it has started it."""
        try:
            with open(job.followers, encoding="utf-8") as file:
                return dict(json.load(file))
        except (OSError, ValueError):
            return {}

    def _lives(self, model: Model) -> bool:
        lock = self.job(model).take_lock()
        if lock is None:
            return True
        os.close(lock)
        return False

    def _follow(self, model: Model, plan: _Plan | None, deadline: Deadline) -> dict[str, Any] | None:
        """None once the model is there; else the result of this call, or of the failure."""
        job = self.job(model)
        followers, status = self._followers(job), job.read_status()
        lock = job.take_lock()
        if lock is not None and self.task in followers and status.get("phase") == FAILED:
            os.close(lock)
            return self._failed(status["msg"])
        if lock is None and status.get("phase") in (DONE, SEEDING):
            # It passes an earlier model on and knows nothing of this one.
            self._end(model, job)
            lock = job.take_lock()
        if lock is not None:
            starts = followers.get(self.task, 0) + 1
            try:
                if starts > _STARTS:
                    return self._failed(
                        f"The staging of {model.path} was killed {starts - 1} times; see {job.log} and dmesg."
                    )
                plan = plan or self._plans([model])[model.path]
                write_private(job.followers, json.dumps({self.task: starts}))
                self._start(job, lock, model, plan)
            finally:
                os.close(lock)
        elif status.get("source", model.source) != model.source:
            raise Refused(
                f"{model.path} is being staged from {status['source']} (pid {status['pid']}): wait until that has "
                f"ended, or end it by: touch {job.stop}"
            )
        elif self.task not in followers:
            write_private(job.followers, json.dumps({**followers, self.task: 0}))
        while not deadline.expired():
            status = job.read_status()
            if status.get("phase") == FAILED:
                return self._failed(status["msg"])
            if status.get("phase") in (DONE, SEEDING):
                return None
            if not self._lives(model) and job.read_status().get("phase") not in staging_worker.ENDED:
                break  # the next call starts it again
            time.sleep(min(_FOLLOW_SECONDS, deadline.remaining()))
        return self._unfinished(model, job.read_status())

    @staticmethod
    def _failed(text: str) -> dict[str, Any]:
        return {"changed": False, "failed": True, "msg": text}

    @staticmethod
    def _unfinished(model: Model, status: Mapping[str, Any]) -> dict[str, Any]:
        line = progress_line(model.path, status)
        return {"changed": False, "unfinished": True, "progress": line, "status": dict(status), "msg": line}

    def _start(self, job: Job, lock: int, model: Model, plan: _Plan) -> None:
        swarm = self.params["swarm"] or None
        if swarm is not None:
            with open(job.torrent, "wb") as file:
                file.write(base64.b64decode(swarm["torrent"]))
        more = {
            "listing": plan.listing.row(),
            "staging": plan.staging,
            "swarm": _without_torrent(swarm),
            "was": staging_place.look(model).state,
            **plan.pythons,
        }
        self._start_worker(job, lock, model, "bring", more)

    def _start_worker(self, job: Job, lock: int, model: Model, kind: str, more: Mapping[str, Any]) -> None:
        for name in staging_sources.CLIENTS:
            staging_sources.source_of(name)
        for path in (job.stop, job.status):
            if os.path.exists(path):
                os.unlink(path)
        names = (
            "endpoint", "token_file", "xet", "sha256", "parallel", "stall", "attempts", "rsync_shell", "rclone_config",
            "keep_previous", "refresh",
        )  # fmt: skip
        request = {name: self.params[name] for name in names}
        request.update(kind=kind, path=model.path, source=model.source, tokenizer=model.tokenizer)
        request.update(more, system_python=sys.executable)
        staging_worker.start(job, lock, request)

    # Plans

    def _plans(self, models: Sequence[Model]) -> dict[str, _Plan]:
        """What is to be done for each model. Refused, before anything is changed: no space, a foreign folder, ..."""
        plans = {model.path: self._plan(model) for model in models}
        room: dict[int, tuple[str, int, list[str]]] = {}
        for path, plan in plans.items():
            if plan.nothing:
                continue
            folder = staging_place.above(path)
            where, need, names = room.get(os.stat(folder).st_dev, (folder, 0, []))
            room[os.stat(folder).st_dev] = (where, need + plan.need, [*names, path])
        for where, need, names in room.values():
            facts = os.statvfs(where)
            free = facts.f_bavail * facts.f_frsize
            need += self.params["reserve_mib"] * _MIB
            if free < need:
                raise Refused(
                    f"{where} has {human(free)} free, {' and '.join(names)} would take {human(need)} "
                    f"(with {self.params['reserve_mib']} MiB to spare): free {human(need - free)} or choose another "
                    "path."
                )
        return plans

    def _plan(self, model: Model) -> _Plan:
        found, source = staging_place.look(model), self.sources[model.path]
        pythons: dict[str, str] = {}
        if self.params["swarm"]:
            listing = Listing.of(self.params["swarm"]["listing"] or {"files": {}})
            pythons["swarm_python"] = staging_sources.python_with("libtorrent", self.params["pythons"])
        else:
            listing = self._list(model, source, pythons)
        if self.check_mode and self.params["swarm"]:
            return _Plan(listing, "")
        if not listing.files:
            raise Refused(f"{model.source} holds no files; correct the model's source.")
        published = any(one.sha256 for one in listing.files.values()) or any(
            name in listing.files for name in staging_worker.MANIFESTS
        )
        if self.params["sha256"] and not published:
            raise Refused(f"SHA-256 sums are asked for, but {model.source} has none (a file SHA256SUMS would do).")
        if found.state == staging_place.PRESENT and staging_place.holds(found, listing):
            return _Plan(listing, "", nothing=True)
        if found.state == staging_place.UNRECORDED:
            wrong = staging_place.wrong_files(model.path, listing.files, weights_only=True)
            if not wrong and not found.damaged:
                return _Plan(listing, "", nothing=True, adopt=True)
            if not self.params["replace"]:
                first = (wrong or list(found.damaged))[0]
                raise Refused(
                    f"{model.path} was not staged by us and differs from {model.source} ({first}): move it away, "
                    "or let it be replaced with model_staging_replace."
                )
        staging = staging_place.staging_folder(
            model.path, Source(source.kind, source.where, listing.commit or source.revision).label
        )
        have = staging_place.staged_bytes(staging)[0]
        freed = sum(
            staging_place.staged_bytes(left)[0] for left in staging_place.half_staged(model.path) if left != staging
        )
        kept = 0
        if found.record is not None and not self.params["swarm"] and not os.path.islink(model.path):
            had = Listing.of(found.record)
            same = found.record["source"] == model.source and had.commit == listing.commit
            kept = sum(
                one.size for name, one in listing.files.items()
                if name in had.files and staging_place.is_weight(name) and name not in found.damaged
                and had.files[name].size == one.size
                and (same or (one.sha256 and one.sha256 == had.files[name].sha256))
            )  # fmt: skip
        fetch = max(0, listing.bytes - have - kept)
        return _Plan(listing, staging, fetch, max(0, fetch - freed), pythons=pythons)

    def _list(self, model: Model, source: Source, pythons: dict[str, str]) -> Listing:
        exclude = self.params["exclude"]
        if source.kind == HUB:
            if self.params["token_file"] and (trouble := staging_sources.file_trouble(self.params["token_file"])):
                raise Refused(trouble)
            pythons["python"] = staging_sources.python_with("huggingface_hub", self.params["pythons"])
            job = self.job(model)
            environment = staging_sources.hub_environment(
                self.params["endpoint"], self.params["token_file"], os.path.join(job.folder, "hub"), False
            )
            return staging_sources.list_hub(source, exclude, pythons["python"], job.folder, environment)
        if source.kind == PATH:
            if os.path.realpath(source.where) == os.path.realpath(model.path):
                raise Refused(
                    f"The model's source is its own path {model.path}; leave the source empty to use it where it is."
                )
            return staging_sources.list_path(source.where, exclude)
        if source.kind == RSYNC:
            return staging_sources.list_rsync(source, exclude, self.params["rsync_shell"])
        if source.kind == RCLONE:
            return staging_sources.list_rclone(source, exclude, self.params["rclone_config"])
        raise Refused(f"{model.source} is another host of the inventory, which only the role model_staging can ask.")

    def _adopt(self, model: Model, plan: _Plan) -> None:
        staged_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        staging_place.write_record(model.path, model, plan.listing, staged_at, "adopted")

    # Passing on

    def seed(self) -> dict[str, Any]:
        """Offer the (one) model to the peers; its torrent and listing once that is under way."""
        model = self.models[0]
        found = self.found(model)
        if found.state in (staging_place.MISSING, staging_place.DAMAGED) and not self.check_mode:
            raise Refused(f"{found.reason} A host can only pass on a whole model.")
        if self.check_mode:
            return {"changed": False, "torrent": "", "listing": {}, "msg": "", "predicted": True}
        job = self.job(model)
        if self.task not in self._followers(job):
            self._end(model, job)
            lock = job.take_lock()
            if lock is None:
                raise Refused(f"{model.path} is being staged by another run; wait until that has ended.")
            try:
                python = staging_sources.python_with("libtorrent", self.params["pythons"])
                more = {
                    "swarm": self.params["swarm"],
                    "swarm_python": python,
                    "files": self._files_to_offer(model, found),
                }
                write_private(job.followers, json.dumps({self.task: 1}))
                self._start_worker(job, lock, model, "seed", more)
            finally:
                os.close(lock)
        deadline = Deadline(self.params["patience"] or self.params["timeout"])
        while True:
            status = job.read_status()
            if status.get("phase") == FAILED:
                return self._failed(status["msg"])
            if status.get("phase") == SEEDING:
                with open(job.torrent, "rb") as file:
                    torrent = base64.b64encode(file.read()).decode()
                return {"changed": False, "torrent": torrent, "listing": status["listing"], "msg": ""}
            if not self._lives(model):
                return self._failed(f"The process that passes {model.path} on has died; see {job.log}.")
            if deadline.expired():
                return self._unfinished(model, status)
            time.sleep(min(_FOLLOW_SECONDS, deadline.remaining()))

    def _files_to_offer(self, model: Model, found: Found) -> list[str]:
        if found.record is not None:
            names = sorted(Listing.of(found.record).files)
        else:
            names = sorted(staging_sources.list_path(model.path, self.params["exclude"]).files)
        backup = staging_place.checkpoint.CONFIG_BACKUP
        if backup not in names and os.path.exists(os.path.join(model.path, backup)):
            names.append(backup)
        return [
            name for name in names if os.path.isfile(os.path.join(model.path, name)) and name != staging_place.RECORD
        ]

    def stop(self) -> dict[str, Any]:
        """End what passes these models on; a staging that still fetches goes on."""
        rows = []
        for model in self.models:
            if self.check_mode:
                continue
            job = self.job(model)
            status = job.read_status()
            if status.get("phase") == SEEDING and self._lives(model):
                self._end(model, job)
            rows.append({"path": model.path, "sent_bytes": job.read_status().get("sent_bytes", 0)})
        return {"changed": False, "models": rows, "msg": ""}

    def _end(self, model: Model, job: Job) -> None:
        """Let a worker that passes a model on end. Refused when it does not."""
        if not self._lives(model):
            return
        if job.read_status().get("phase") not in (SEEDING, DONE):
            return
        with open(job.stop, "w", encoding="utf-8"):
            pass
        deadline = Deadline(_STOP_SECONDS)
        while self._lives(model):
            if deadline.expired():
                raise Refused(
                    f"The process that passes {model.path} on (pid {job.read_status().get('pid')}) does not end."
                )
            time.sleep(0.1)
        os.unlink(job.stop)
