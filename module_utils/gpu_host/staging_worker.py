"""Brings one model to its path, in a process of its own that outlives the connection it was started over.

It starts the program that fetches (a child), watches the bytes on disk, ends a child that has stalled and starts it
again, checks the shards, and switches the finished model in. How far it is stands in the job's status file, which
``staging.run`` reads. The job's lock is held for as long as the process lives.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Callable

from . import background, checkpoint, staging_place, staging_sources
from .masking import mask_text
from .staging_place import Model
from .staging_sources import Listing, Source, SourceError

DONE, FAILED, SEEDING = "done", "failed", "seeding"
# A call that follows the job waits no longer.
ENDED = (DONE, FAILED, SEEDING)
LOOK_SECONDS = 0.25
RATE_SECONDS = 30.0
MANIFESTS = ("SHA256SUMS", "sha256sums.txt", "SHA256SUMS.txt", "checksums.sha256")


class StagingFailed(Exception):
    """The model could not be brought; the text is one sentence for the user."""


class Stopped(Exception):
    """Somebody asked this job to end."""


@dataclass(frozen=True)
class Job:
    """The job's files on the host, one folder a model, in the state folder."""

    folder: str

    @property
    def status(self) -> str:
        return os.path.join(self.folder, "status.json")

    @property
    def log(self) -> str:
        return os.path.join(self.folder, "log")

    @property
    def stop(self) -> str:
        return os.path.join(self.folder, "stop")

    @property
    def followers(self) -> str:
        return os.path.join(self.folder, "followers.json")

    @property
    def torrent(self) -> str:
        return os.path.join(self.folder, "torrent")

    def read_status(self) -> dict[str, Any]:
        """The last status, {} where there is none."""
        try:
            with open(self.status, encoding="utf-8") as file:
                return dict(json.load(file))
        except (OSError, ValueError):
            return {}

    def take_lock(self) -> int | None:
        """The job's lock as a file number, None while a worker lives."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        number = os.open(os.path.join(self.folder, "lock"), flags, 0o600)
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(number)
            return None
        return number


class Rate:
    """Bytes a second over the last half minute."""

    def __init__(self, seconds: float = RATE_SECONDS) -> None:
        self._seconds = seconds
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, now: float, total: int) -> float:
        self._seen.append((now, total))
        while len(self._seen) > 2 and now - self._seen[0][0] > self._seconds:
            self._seen.popleft()
        first, before = self._seen[0]
        return max(0.0, (total - before) / (now - first)) if now > first else 0.0


class Child(background.Program):
    """One program that fetches; what it says is kept in a file."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], output: str, answer: str = "") -> None:
        self.answer = answer
        self._output = output
        super().__init__(command, environment, output)

    def read_answer(self) -> dict[str, Any]:
        try:
            with open(self.answer, encoding="utf-8") as file:
                return dict(json.load(file))
        except (OSError, ValueError):
            return {}

    def trouble(self) -> str:
        """Why it failed, in its own words."""
        answer = self.read_answer()
        if answer.get("error"):
            return str(answer["error"])
        try:
            with open(self._output, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 4096))
                lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        status = self.process.returncode
        ended = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
        name = os.path.basename(self.command[0])
        return f"{name} ended with {ended}" + (f": {mask_text(lines[-1][:300])}" if lines else "")


class Worker:
    """One job. `request` is what staging.run has checked: see there."""

    def __init__(self, job: Job, request: Mapping[str, Any]) -> None:
        self.job = job
        self.request = request
        self.model = Model(request["path"], request["source"], request["tokenizer"])
        self.source: Source = staging_sources.parse(request["source"])
        self.listing = Listing.of(request["listing"]) if request.get("listing") else None
        self.staging = request.get("staging", "")
        self.swarm: Mapping[str, Any] = request.get("swarm") or {}
        self._began = time.monotonic()
        self._took: float | None = None
        self._rate = Rate()
        self._status: dict[str, Any] = {}
        self._seed: Child | None = None
        self._sent = 0

    # What is said

    def say(self, phase: str, done: int = 0, total: int = 0, **more: Any) -> None:
        """Replace the status: `bytes` of `total_bytes`, `rate` in bytes a second, `seconds_left` (None: unknown)."""
        now = time.monotonic()
        if phase != self._status.get("phase"):
            self._rate = Rate()
            self.note(f"{phase} {more.get('msg', '')}".strip())
        rate = self._rate.add(now, done)
        left = (total - done) / rate if rate > 0 and total else None
        self._status = {
            **{name: self._status[name] for name in ("attempt", "xet", "pieces_refused") if name in self._status},
            "pid": os.getpid(), "path": self.model.path, "source": self.model.source,
            "was": self.request.get("was", ""),
            "phase": phase, "bytes": done, "total_bytes": total, "rate": round(rate), "msg": "",
            "seconds_left": None if left is None else round(left, 1),
            "seconds": round(now - self._began if self._took is None else self._took, 1),
            **more,
        }  # fmt: skip
        passing = f"{self.job.status}.new"
        with open(passing, "w", encoding="utf-8") as file:
            json.dump(self._status, file)
        os.replace(passing, self.job.status)

    def _fail(self, text: str) -> None:
        self.say(FAILED, int(self._status.get("bytes", 0)), int(self._status.get("total_bytes", 0)), msg=text)

    def note(self, text: str) -> None:
        """A line for the job's log."""
        with open(self.job.log, "a", encoding="utf-8") as file:
            file.write(f"{datetime.now(timezone.utc).isoformat(timespec='seconds')} {mask_text(text)}\n")

    # The whole

    def run(self) -> None:
        """To the end; the outcome is the last status."""
        try:
            self.say("starting")
            self._offer() if self.request["kind"] == "seed" else self._bring()
        except Stopped:
            self._fail(f"The staging of {self.model.path} was stopped; what has come is kept.")
        except (StagingFailed, SourceError) as error:
            self._fail(str(error))
        except OSError as error:
            where = f" ({error.filename})" if error.filename else ""
            self._fail(f"{self.model.path} can't be staged: {error.strerror or error}{where}.")
        except Exception as error:
            self.note(f"{type(error).__name__}: {error}")
            self._fail(f"The staging itself failed, {type(error).__name__}: {error}; see {self.job.log}.")
        finally:
            if self._seed is not None:
                self._seed.end()

    def _bring(self) -> None:
        assert self.listing is not None
        os.makedirs(os.path.dirname(self.model.path), exist_ok=True)
        with staging_place.path_lock(self.model.path) as lock:
            while not staging_place.try_lock(lock):
                self.say("waiting", msg=f"for another staging of {self.model.path}")
                self._pause(LOOK_SECONDS)
            found = staging_place.look(self.model)
            there = found.state == staging_place.PRESENT
            if not there or (self.request["refresh"] and not staging_place.holds(found, self.listing)):
                self._stage(found, self.listing)
                self._took = time.monotonic() - self._began  # passing it on takes longer
        counts = {"sent_bytes": self._sent} if self.swarm else {}
        if self._seed is None:
            self.say(DONE, self.listing.bytes, self.listing.bytes, **counts)
        else:
            self._pass_on(self._seed)

    def _stage(self, found: staging_place.Found, listing: Listing) -> None:
        os.makedirs(self.staging, exist_ok=True)
        for left in staging_place.half_staged(self.model.path):
            if left != self.staging:
                self.note(f"removing {left}, staged in part from elsewhere")
                staging_place.discard(left)
        if not self.swarm:  # which may write into files that are there
            staging_place.link_unchanged(self.model.path, self.staging, self.model, found, listing)
        repaired: set[str] = set()
        while True:
            self._fetch(listing)
            wrong, why = self._check(listing)
            if not wrong:
                break
            again = set(wrong) - repaired
            if not again or self.swarm:
                raise StagingFailed(
                    f"{self.model.source} was fetched twice and is damaged at its source: {why} Mend it there, then "
                    "stage it again."
                )
            self.note(f"fetching again: {why}")
            repaired |= again
            for name in again:
                os.unlink(os.path.join(self.staging, name))
        self.say("switching", listing.bytes, listing.bytes)
        staging_place.tidy(self.staging, listing.files)
        staged_at = datetime.now(timezone.utc).isoformat(timespec="seconds")
        via = "peers" if self.swarm else self.source.kind
        staging_place.write_record(self.staging, self.model, listing, staged_at, via)
        staging_place.sync(self.staging)
        old = staging_place.switch(self.staging, self.model.path)
        if old and self.request["keep_previous"]:
            staging_place.discard(f"{self.model.path}.previous")
            os.rename(old, f"{self.model.path}.previous")
        elif old:
            staging_place.discard(old)

    # Fetching

    def _fetch(self, listing: Listing) -> None:
        """Until every file has its length. StagingFailed after `attempts` in a row that brought nothing new."""
        xet = bool(self.request["xet"]) and listing.xet
        best, idle, trouble, tries = -1, 0, "", 0
        while True:
            missing = staging_place.wrong_files(self.staging, listing.files)
            # Peers fill files of the full length piece by piece: there the child alone knows what is missing.
            if not missing and (self._seed is not None or not self.swarm):
                return
            tries += 1
            self._status.update(attempt=tries, xet=xet)
            trouble, permanent = self._attempt(listing, missing, xet)
            if permanent:
                raise StagingFailed(trouble)
            if trouble:
                self.note(trouble)
                xet = False
            there = staging_place.staged_bytes(self.staging)[0]
            idle = 0 if there > best else idle + 1
            best = max(best, there)
            if idle >= self.request["attempts"] or tries >= 10 * self.request["attempts"]:
                part = f"{100 * there / listing.bytes:.1f} %" if listing.bytes else "a part"
                raise StagingFailed(
                    f"{self.model.source} could not be brought in {tries} attempts ({part} is there): "
                    f"{trouble.rstrip('.')}. What has come is kept in {self.staging}: run again to go on."
                )
            if trouble:
                self._pause(min(2.0**idle, 20.0), "retrying", trouble)

    def _attempt(self, listing: Listing, missing: Sequence[str], xet: bool) -> tuple[str, bool]:
        """Run the program that fetches. ('', False) when it ended well, else why not and whether that is final."""
        sizes = {name: listing.files[name].size for name in missing}
        self._remove_useless(listing, missing)
        children = self._start(sizes, xet)
        try:
            return self._watch(children, listing)
        finally:
            for child in children:
                if child is not self._seed and not child.end():
                    raise StagingFailed(
                        f"The program that fetches {self.model.source} can't be ended (pid {child.process.pid}): it "
                        "hangs in the kernel, mostly on a mount whose server is gone."
                    )

    def _watch(self, children: Sequence[Child], listing: Listing) -> tuple[str, bool]:
        last_beat, grown_at = -1, time.monotonic()
        while True:
            phase, more = "fetching", {}
            if self.swarm:
                answer = children[0].read_answer()
                here, beat = int(answer.get("bytes", 0)), int(answer.get("beat", 0))
                self._sent = int(answer.get("sent", 0))
                more = {"peers": answer.get("peers", 0), "pieces_refused": answer.get("pieces_refused", 0)}
                if answer.get("state") == "checking_files":
                    phase = "checking pieces"
                if answer.get("complete"):
                    self._seed = children[0]
            else:
                here, beat = staging_place.staged_bytes(self.staging)
            now = time.monotonic()
            if beat != last_beat:
                last_beat, grown_at = beat, now
            self.say(phase, min(here, listing.bytes), listing.bytes, **more)
            if self._seed is not None:
                return "", False
            ended = [child for child in children if child.process.poll() is not None]
            for child in ended:
                if child.process.returncode != 0 or self.swarm:
                    return child.trouble(), bool(child.read_answer().get("permanent"))
            if len(ended) == len(children):
                return "", False
            if now - grown_at > self.request["stall"]:
                return f"nothing came for {self.request['stall']:g} s", False
            self._pause(LOOK_SECONDS)

    def _remove_useless(self, listing: Listing, missing: Sequence[str]) -> None:
        """What no attempt can go on with: files longer than they should be, and parts of snapshot_download's."""
        if self.swarm:
            return
        for name in missing:
            path = os.path.join(self.staging, name)
            if os.path.lexists(path) and os.lstat(path).st_size > listing.files[name].size:
                os.unlink(path)
        for here, _, names in os.walk(os.path.join(self.staging, ".cache", "huggingface", "download")):
            for name in names:
                if name.endswith(".incomplete"):
                    os.unlink(os.path.join(here, name))

    def _start(self, sizes: Mapping[str, int], xet: bool) -> list[Child]:
        request, job, folder = self.request, self.job.folder, self.staging
        if self.swarm:
            return [self._swarm_child("fetch", folder)]
        environment: Mapping[str, str] = {**os.environ, "LC_ALL": "C"}
        if self.source.kind == staging_sources.HUB:
            assert self.listing is not None
            environment = staging_sources.hub_environment(
                request["endpoint"], request["token_file"], os.path.join(job, "hub"), xet
            )
            command, answer = staging_sources.client(
                "hub_client", request["python"], job, do="xet" if xet else "http", repository=self.source.where,
                revision=self.listing.commit, folder=folder, files=sizes, parallel=request["parallel"],
            )  # fmt: skip
            return [Child(command, environment, os.path.join(job, "output"), answer)]
        if self.source.kind == staging_sources.PATH:
            command, answer = staging_sources.client(
                "copy_client", request["system_python"], job, source=self.source.where, folder=folder, files=sizes,
                parallel=request["parallel"],
            )  # fmt: skip
            return [Child(command, environment, os.path.join(job, "output"), answer)]
        rsync = self.source.kind == staging_sources.RSYNC
        children = []
        for number, names in enumerate(staging_sources.spread(sizes, request["parallel"] if rsync else 1)):
            listed = os.path.join(job, f"files-{number}")
            with open(listed, "w", encoding="utf-8") as file:
                file.write("".join(f"{name}\n" for name in names))
            command = self._rsync(listed) if rsync else self._rclone(listed)
            children.append(Child(command, environment, os.path.join(job, f"output-{number}")))
        return children

    def _rsync(self, listed: str) -> list[str]:
        # Appending goes on with a file that was cut off, and compares the whole file's checksum at its end.
        command = ["rsync", "-Lt", "--append-verify", "--chmod=F644,D755", f"--files-from={listed}"]
        command += staging_sources.rsync_shell(self.source, self.request["rsync_shell"])
        return [*command, f"{self.source.where}/", f"{self.staging}/"]

    def _rclone(self, listed: str) -> list[str]:
        command = ["rclone", "copy", f"--files-from-raw={listed}", f"--transfers={self.request['parallel']}"]
        command += ["--no-traverse", "--multi-thread-streams=0", "--local-no-preallocate", "--retries=1"]
        command += staging_sources.rclone_config(self.request["rclone_config"])
        return [*command, self.source.where, self.staging]

    # Checking

    def _check(self, listing: Listing) -> tuple[list[str], str]:
        """Names of staged files that are to be fetched again, and why. StagingFailed: fetching again would not help."""
        self.say("checking shards", listing.bytes, listing.bytes)
        outcome = checkpoint.inspect(self.staging, tokenizer=self.model.tokenizer)
        damaged = sorted(set(outcome["damaged"]) & set(listing.files))
        # What the downloaders leave behind goes before the switch; it is no sign of a half model here.
        errors = [one for one in outcome["findings"] if one["severity"] == "error" and one["code"] != "half_staged"]
        if damaged:  # without the finding's cure, which is for a folder that is served from
            return damaged, errors[0]["found"] if errors else outcome["msg"]
        if errors:
            raise StagingFailed(f"{self.model.source} is no whole model: {errors[0]['found']}")
        if not self.request["sha256"]:
            return [], ""
        published = self._published(listing)
        done, wrong = 0, []
        self.say("hashing", 0, listing.bytes)
        names = sorted(published, key=lambda name: -listing.files[name].size)
        with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
            for name, found in zip(names, pool.map(self._sha256, names)):
                done += listing.files[name].size
                self.say("hashing", done, listing.bytes)
                if found != published[name]:
                    wrong.append(name)
        why = f"{len(wrong)} files differ from their published SHA-256, {wrong[0]} first." if wrong else ""
        return sorted(wrong), why

    def _sha256(self, name: str) -> str:
        return checkpoint.sha256(os.path.join(self.staging, name))

    def _published(self, listing: Listing) -> dict[str, str]:
        sums = {name: one.sha256 for name, one in listing.files.items() if one.sha256}
        for name in MANIFESTS:
            if name in listing.files:
                with open(os.path.join(self.staging, name), encoding="utf-8") as file:
                    try:
                        sums.update(checkpoint.parse_manifest(file.read()))
                    except checkpoint.CheckpointError as error:
                        raise StagingFailed(f"{self.model.source}: {error}") from error
        return {name: value for name, value in sums.items() if name in listing.files and name not in MANIFESTS}

    # Passing on

    def _swarm_child(self, do: str, folder: str, **more: Any) -> Child:
        command, answer = staging_sources.client(
            "swarm_client", self.request["swarm_python"], self.job.folder, do=do, folder=folder,
            torrent=self.job.torrent, peers=self.swarm.get("peers", []), port=self.swarm.get("port", 0),
            stop=self.job.stop, idle=self.swarm.get("idle", 0), rank=self.swarm.get("rank", 0),
            of=self.swarm.get("of", 1), **more,
        )  # fmt: skip
        return Child(command, {**os.environ, "LC_ALL": "C"}, os.path.join(self.job.folder, "output"), answer)

    def _offer(self) -> None:
        """The origin: hash the model into a torrent, unless that is known, and hand its pieces out."""
        record = staging_place.read_record(self.model.path)
        names = self.request["files"]
        facts = [os.stat(os.path.join(self.model.path, name)) for name in names]
        state = json.dumps([names, [[one.st_size, one.st_mtime_ns, one.st_ino] for one in facts]])
        total = sum(one.st_size for one in facts)
        if self._remembered() != state or not os.path.exists(self.job.torrent):
            child = self._swarm_child("make", self.model.path, files=names)
            while child.process.poll() is None:
                self.say("hashing pieces", int(child.read_answer().get("bytes", 0)), total)
                try:
                    self._pause(LOOK_SECONDS)
                except Stopped:
                    child.end()
                    raise
            if child.process.returncode != 0:
                raise StagingFailed(f"{self.model.path} can't be offered to other hosts: {child.trouble()}.")
            with open(f"{self.job.torrent}.of", "w", encoding="utf-8") as file:
                file.write(state)
        listing = {name: [one.st_size, None] for name, one in zip(names, facts)}
        if record is not None:
            for name, (size, sha256) in record["files"].items():
                if name in listing and listing[name][0] == size:
                    listing[name][1] = sha256
        row = {"commit": record["commit"] if record else "", "files": listing}
        self._seed = self._swarm_child("seed", self.model.path)
        self._pass_on(self._seed, total, listing=row)

    def _remembered(self) -> str:
        try:
            with open(f"{self.job.torrent}.of", encoding="utf-8") as file:
                return file.read()
        except OSError:
            return ""

    def _pass_on(self, child: Child, total: int = 0, **more: Any) -> None:
        """Hand pieces out until told to stop, or until nobody has asked for one for a while."""
        total = total or (self.listing.bytes if self.listing else 0)
        while child.process.poll() is None:
            answer = child.read_answer()
            if answer or self.request["kind"] != "seed":
                self._sent = int(answer.get("sent", 0))
                self.say(SEEDING, total, total, sent_bytes=self._sent, peers=answer.get("peers", 0),
                         pieces_refused=answer.get("pieces_refused", 0), **more)  # fmt: skip
            time.sleep(LOOK_SECONDS)
        if child.process.returncode != 0 and self.request["kind"] == "seed":
            raise StagingFailed(f"{self.model.path} can't be passed on: {child.trouble()}.")
        self.say(DONE, total, total, sent_bytes=int(child.read_answer().get("sent", 0)))

    def _pause(self, seconds: float, phase: str = "", msg: str = "") -> None:
        """Wait, but not once somebody asks us to stop."""
        end = time.monotonic() + seconds
        while True:
            if os.path.exists(self.job.stop):
                raise Stopped()
            if time.monotonic() >= end:
                return
            if phase:
                self.say(phase, self._status.get("bytes", 0), self._status.get("total_bytes", 0), msg=msg)
            time.sleep(min(LOOK_SECONDS, max(0.0, end - time.monotonic())))


def start(job: Job, lock: int, request: Mapping[str, Any], work: Callable[[Worker], None] = Worker.run) -> None:
    """Start the worker in a session of its own, detached from whoever calls; it keeps `lock`. Returns at once."""
    background.begin(lambda: work(Worker(job, request)), keep=lock)
