"""Staging with the real downloaders: huggingface_hub with a hub on loopback, rsync, rclone, copies of a mount."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from gpu_host import arguments, checkpoint, staging, staging_place, staging_sources
from gpu_host.staging_worker import Rate

from tests.hub_double import COMMIT, Hub

from .model_folders import write_safetensors, write_target

OTHER_COMMIT = "f" * 40
SHARD = "model-00001-of-00003.safetensors"


class Stage:
    """Calls of the module for one model in a folder of the test's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "models" / "tiny"
        self.state = folder / "state"
        self.defaults: dict[str, Any] = {"stall": 1.0, "reserve_mib": 0}

    def parameters(self, source: str, **more: Any) -> dict[str, Any]:
        given = {
            "models": [{"path": str(self.path), "source": source}],
            "pythons": [sys.executable],
            "state_folder": str(self.state),
            **self.defaults,
            **more,
        }
        validated = ArgumentSpecValidator(arguments.MODEL_STAGING).validate(given)
        problems = validated.error_messages or staging_sources.problems(validated.validated_parameters)
        assert not problems, problems
        return dict(validated.validated_parameters)

    def __call__(self, source: str, check_mode: bool = False, **more: Any) -> dict[str, Any]:
        return staging.run(self.parameters(source, **more), check_mode=check_mode, diff=True)

    @property
    def job(self) -> Path:
        return next((self.state / "staging").iterdir())

    def status(self) -> dict[str, Any]:
        try:
            return dict(json.loads((self.job / "status.json").read_text()))
        except (OSError, StopIteration, ValueError):
            return {}

    def started(self) -> int:
        """The worker's pid, once it has one."""
        end = time.monotonic() + 10
        while "pid" not in self.status():
            assert time.monotonic() < end
            time.sleep(0.01)
        return int(self.status()["pid"])

    def log(self) -> str:
        return (self.job / "log").read_text()

    def kill_worker(self) -> None:
        """SIGKILL to the worker as the machine would, or somebody's oom killer; what it started dies with it."""
        pid = self.status().get("pid")
        if pid:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                return
            end = time.monotonic() + 5
            while os.path.exists(f"/proc/{pid}") and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
                assert time.monotonic() < end
                time.sleep(0.01)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    for job in (made.state / "staging").glob("*") if made.state.exists() else ():
        (job / "stop").touch()
        made.kill_worker()


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    folder = write_target(tmp_path / "origin")
    (folder / "training_state.pt").write_bytes(b"x" * 5000)
    (folder / "pytorch_model.bin").write_bytes(b"x" * 5000)
    (folder / "code").mkdir()
    (folder / "code" / "model.py").write_text("pass\n")
    return folder


@pytest.fixture
def hub(origin: Path) -> Iterator[Hub]:
    with Hub(origin) as serving:
        yield serving


def same_files(one: Path, other: Path, left_out: set[str]) -> bool:
    def contents(folder: Path) -> dict[str, bytes]:
        return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

    here, there = contents(one), contents(other)
    here.pop(staging_place.RECORD, None)
    return here == {name: data for name, data in there.items() if name not in left_out}


USELESS = {"training_state.pt", "pytorch_model.bin"}


# From a hub


def test_a_model_is_staged_as_the_hub_has_it_without_what_a_server_does_not_need(stage, hub, origin):
    result = stage(hub.source, endpoint=hub.url)
    assert (result.get("failed"), result["changed"], result["staged"]) == (None, True, [str(stage.path)]), result
    assert "tiny: missing" in result["diff"]["before"] and f"tiny: {hub.source}" in result["diff"]["after"]
    assert same_files(stage.path, origin, USELESS)
    record = staging_place.read_record(str(stage.path))
    assert record is not None and record["commit"] == COMMIT
    assert [p.name for p in stage.path.parent.iterdir() if "staging-" in p.name] == [".tiny.staging-lock"]
    assert hub.gets("training_state.pt") == hub.gets("pytorch_model.bin") == []
    assert stat.S_IMODE((stage.path / SHARD).stat().st_mode) == 0o644


def test_an_unchanged_model_is_told_without_asking_the_hub(stage, hub):
    stage(hub.source, endpoint=hub.url)
    hub.requests.clear()
    result = stage(hub.source, endpoint=hub.url)
    assert (result["changed"], result["missing"], hub.requests) == (False, [], [])


def test_an_edited_config_json_does_not_make_a_model_changed_but_a_damaged_shard_does(stage, hub, origin):
    stage(hub.source, endpoint=hub.url)
    (stage.path / "config.json").write_text('{"architectures": ["X"], "edited": true, "longer": "than before, by far"}')
    assert stage(hub.source, endpoint=hub.url)["changed"] is False
    hub.requests.clear()
    os.truncate(stage.path / SHARD, 100)
    result = stage(hub.source, endpoint=hub.url)
    assert result["changed"] is True, result
    assert (stage.path / SHARD).read_bytes() == (origin / SHARD).read_bytes()
    assert hub.gets("model-00002-of-00003.safetensors") == []  # whole ones are not fetched again


def test_check_mode_says_what_would_be_fetched_and_changes_nothing(stage, hub):
    result = stage(hub.source, check_mode=True, endpoint=hub.url)
    assert (result["changed"], result["predicted"], stage.path.parent.exists()) == (True, True, False)
    assert "would be staged from hf:acme/tiny@main" in result["msg"]
    row = result["models"][0]
    assert row["files"] == 8 and row["need_bytes"] > 4000 and set(row["left_out"]) == USELESS
    assert result["diff"]["before"] != result["diff"]["after"]


def test_a_new_commit_of_a_branch_is_taken_on_refresh_alone_and_only_what_differs_is_fetched(stage, hub, origin):
    stage(hub.source, endpoint=hub.url)
    before = (stage.path / SHARD).stat().st_ino
    hub.commit = OTHER_COMMIT
    (origin / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "new": 1}')
    assert stage(hub.source, endpoint=hub.url)["changed"] is False
    hub.requests.clear()
    result = stage(hub.source, endpoint=hub.url, refresh=True)
    assert result["changed"] is True, result
    assert json.loads((stage.path / "config.json").read_text())["new"] == 1
    assert (stage.path / SHARD).stat().st_ino == before and hub.gets(SHARD) == []
    assert stage(hub.source, endpoint=hub.url, refresh=True)["changed"] is False


def test_a_transfer_by_xet_that_hangs_is_ended_and_plain_http_goes_on(stage, hub, origin):
    hub.xet = "silent"
    result = stage(hub.source, endpoint=hub.url)
    assert not result.get("failed"), result
    assert "nothing came for 1 s" in stage.log()
    assert any("xet-read-token" in path for _, path, _ in hub.requests)
    assert same_files(stage.path, origin, USELESS)


def test_a_transfer_by_xet_brings_the_large_files_whole(stage, hub, origin):
    big_shard(origin)
    hub.xet = "works"
    result = stage(hub.source, endpoint=hub.url, sha256=True)
    assert not result.get("failed"), result
    assert same_files(stage.path, origin, USELESS)
    assert "nothing came" not in stage.log()
    fetched = {path.rpartition("/")[2] for method, path, _ in hub.requests if "/xet/xorbs/" in path}
    assert len(fetched) == len(list(origin.rglob("*.safetensors")))
    assert hub.sent.get(SHARD, 0) == 0


def big_shard(origin: Path, mib: int = 4) -> bytes:
    write_safetensors(origin / "model-00001-of-00003.safetensors", {
        f"model.layers.1.weight_{i}": ("BF16", (mib << 17, 1), os.urandom(mib << 18)) for i in range(4)
    })  # fmt: skip
    return (origin / SHARD).read_bytes()


@pytest.mark.parametrize("fault", ["stall", "cut"])
def test_a_file_that_stops_half_way_goes_on_from_there(stage, hub, origin, fault):
    data = big_shard(origin)
    getattr(hub, fault)[SHARD] = 1
    result = stage(hub.source, endpoint=hub.url)
    assert not result.get("failed"), result
    first, second = hub.gets(SHARD)[:2]
    assert first == "" and 0 < int(second.removeprefix("bytes=").rstrip("-")) <= len(data) // 2
    assert (stage.path / SHARD).read_bytes() == data


def test_a_hub_that_falls_silent_for_good_ends_in_a_sentence_and_keeps_what_has_come(stage, hub, origin):
    big_shard(origin)
    hub.stall[SHARD] = 99
    result = stage(hub.source, endpoint=hub.url, attempts=2)
    assert result["failed"] and "could not be brought" in result["msg"] and "nothing came for 1 s" in result["msg"]
    assert "run again to go on" in result["msg"] and not stage.path.exists()
    hub.stall.clear()
    hub.requests.clear()
    assert not stage(hub.source, endpoint=hub.url).get("failed")
    assert hub.gets(SHARD)[0].startswith("bytes=") and hub.gets("tokenizer.json") == []


def test_a_byte_that_changed_on_the_way_is_found_by_its_sha256_and_fetched_again(stage, hub, origin):
    hub.corrupt[SHARD] = 1
    result = stage(hub.source, endpoint=hub.url, sha256=True)
    assert not result.get("failed"), result
    assert "differ from their published SHA-256" in stage.log()
    assert same_files(stage.path, origin, USELESS)


def test_a_file_that_comes_wrong_again_and_again_is_never_served(stage, hub):
    hub.corrupt[SHARD] = 99
    result = stage(hub.source, endpoint=hub.url, sha256=True)
    assert result["failed"] and "damaged at its source" in result["msg"] and SHARD in result["msg"]
    assert not stage.path.exists()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda o: os.truncate(o / SHARD, 700), "damaged at its source"),
        (lambda o: (o / SHARD).unlink(), f"The shard {SHARD} is missing"),
        (lambda o: (o / "config.json").write_text("{oops"), "config.json is malformed"),
    ],
)
def test_a_source_that_is_no_whole_model_is_refused_before_the_switch(stage, hub, origin, spoil, sentence):
    spoil(origin)
    result = stage(hub.source, endpoint=hub.url)
    assert result["failed"] and sentence in result["msg"], result["msg"]
    assert not stage.path.exists()


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("hf:acme/tiny@v9", "acme/tiny has no revision v9"),
        ("hf:acme/other@main", "The hub has no model acme/other"),
    ],
)
def test_what_the_hub_does_not_have_is_said_at_once(stage, hub, source, sentence):
    began = time.monotonic()
    result = stage(source, endpoint=hub.url)
    assert result["refused"] and sentence in result["msg"], result["msg"]
    assert time.monotonic() - began < 10 and not stage.path.parent.exists()


def test_a_gated_model_says_what_to_accept(stage, hub):
    hub.gated = True
    assert "accept its terms" in stage(hub.source, endpoint=hub.url)["msg"]


def test_a_hub_out_of_reach_is_named_with_the_model(stage):
    result = stage("hf:acme/tiny@main", endpoint="http://127.0.0.1:9")
    assert result["refused"] and "The hub can't be asked for acme/tiny" in result["msg"]


def test_the_token_comes_from_its_file_and_stands_nowhere_else(stage, hub, tmp_path):
    hub.token = "hf_abcdefghijklmnopqrstuvwxyz"
    token = tmp_path / "token"
    token.write_text(hub.token + "\n")
    token.chmod(0o600)
    assert "may see it" in stage(hub.source, endpoint=hub.url)["msg"]
    result = stage(hub.source, endpoint=hub.url, token_file=str(token))
    assert not result.get("failed"), result
    written = [p.read_bytes() for p in (stage.state).rglob("*") if p.is_file()]
    assert written and not [data for data in written if hub.token.encode() in data]


def test_a_token_file_that_others_may_read_is_refused(stage, hub, tmp_path):
    token = tmp_path / "token"
    token.write_text("hf_x")
    token.chmod(0o644)
    result = stage(hub.source, endpoint=hub.url, token_file=str(token))
    assert result["refused"] and "mode 0644" in result["msg"] and "chmod 0600" in result["msg"]


def test_too_little_space_is_refused_before_anything_is_fetched(stage, hub):
    result = stage(hub.source, endpoint=hub.url, reserve_mib=1 << 40)
    assert result["refused"] and "free" in result["msg"] and str(stage.path) in result["msg"]
    assert hub.gets(SHARD) == [] and not stage.path.parent.exists()


# What is in the way


def test_a_folder_that_was_not_staged_is_kept_unless_it_may_be_replaced(stage, hub, origin):
    write_target(stage.path, shards=2)
    result = stage(hub.source, endpoint=hub.url)
    assert result["refused"] and "was not staged by us" in result["msg"] and "model_staging_replace" in result["msg"]
    assert (stage.path / "model-00002-of-00002.safetensors").exists()
    assert not stage(hub.source, endpoint=hub.url, replace=True).get("failed")
    assert same_files(stage.path, origin, USELESS)


def test_a_folder_that_is_what_the_source_holds_is_taken_over_without_fetching(stage, hub, origin):
    shutil.copytree(origin, stage.path)
    result = stage(hub.source, endpoint=hub.url)
    assert result["changed"] and hub.gets(SHARD) == []
    assert stage(hub.source, endpoint=hub.url)["changed"] is False


def test_a_model_without_a_source_is_checked_where_it_is(stage):
    assert "There is no model" in stage("")["msg"]
    write_target(stage.path)
    assert stage("")["changed"] is False
    os.truncate(stage.path / SHARD, 600)
    result = stage("")
    assert result["refused"] and "truncated" in result["msg"]


def test_a_server_finds_the_old_model_or_the_new_one_at_every_moment(stage, hub, origin):
    stage(hub.source, endpoint=hub.url)
    hub.commit = OTHER_COMMIT
    for number in range(1, 4):
        (origin / f"model-0000{number}-of-00003.safetensors").unlink()
    (origin / "model.safetensors.index.json").unlink()
    write_target(origin, shards=2)
    seen, done = [], threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.append(sorted(p.name for p in stage.path.glob("*.safetensors")))

    looker = threading.Thread(target=look)
    looker.start()
    try:
        result = stage(hub.source, endpoint=hub.url, refresh=True, keep_previous=True)
    finally:
        done.set()
        looker.join()
    assert not result.get("failed"), result
    assert {len(names) for names in seen} == {2, 3}
    assert checkpoint.inspect(f"{stage.path}.previous")["complete"]


# Interrupted


@pytest.mark.parametrize("seed", range(3))
def test_a_staging_that_is_killed_at_random_moments_goes_on_and_never_shows_a_half(stage, hub, origin, seed):
    chance = random.Random(seed)
    data = big_shard(origin)
    hub.bytes_per_second = 4 << 20
    for _ in range(5):
        result = stage(hub.source, endpoint=hub.url, patience=chance.uniform(0.3, 1.5))
        if not result.get("unfinished"):
            break
        stage.kill_worker()
        # The worker goes on after the call has returned, and may have ended in between.
        assert not stage.path.exists() or checkpoint.inspect(str(stage.path))["complete"]
    else:
        hub.bytes_per_second = 0.0
        result = stage(hub.source, endpoint=hub.url)
    assert not result.get("failed"), result
    assert (stage.path / SHARD).read_bytes() == data and checkpoint.inspect(str(stage.path))["complete"]
    assert hub.sent[SHARD] < 2 * len(data)


def test_a_call_that_ends_early_says_how_far_it_is_and_the_next_follows_the_same_work(stage, hub, origin):
    big_shard(origin)
    hub.bytes_per_second = 2 << 20
    lines, result = [], stage(hub.source, endpoint=hub.url, patience=1.0, task="a")
    pid = stage.started()
    while result.get("unfinished"):
        lines.append(result["progress"])
        result = stage(hub.source, endpoint=hub.url, patience=1.0, task="a")
    assert not result.get("failed") and result["changed"] and stage.status()["pid"] == pid
    assert len(lines) >= 2
    assert any("%" in line and "/s" in line and "left" in line for line in lines), lines


def test_another_task_follows_a_staging_that_goes_on_and_another_source_is_refused(stage, hub, origin):
    big_shard(origin)
    hub.bytes_per_second = 2 << 20
    stage(hub.source, endpoint=hub.url, patience=0.5, task="a")
    pid = stage.started()
    other = stage("hf:acme/tiny@v1", endpoint=hub.url, patience=0.5, task="b")
    assert other["refused"] and f"pid {pid}" in other["msg"]
    hub.bytes_per_second = 0.0
    result = stage(hub.source, endpoint=hub.url, task="c")
    assert result["changed"] and stage.status()["pid"] == pid


def test_a_staging_can_be_stopped_and_says_so(stage, hub, origin):
    big_shard(origin)
    hub.bytes_per_second = 1 << 20
    stage(hub.source, endpoint=hub.url, patience=0.8, task="a")
    (stage.job / "stop").touch()
    result = stage(hub.source, endpoint=hub.url, task="a")
    assert result["failed"] and "was stopped" in result["msg"]


# From a mount, rsync, rclone


def test_a_mount_is_copied_and_a_copy_that_was_cut_off_goes_on(stage, origin):
    data = big_shard(origin)
    half = Path(f"{stage.path}.staging-path")
    half.mkdir(parents=True)
    (half / f"{SHARD}.part").write_bytes(data[: len(data) // 2])
    result = stage(str(origin))
    assert not result.get("failed"), result
    assert same_files(stage.path, origin, USELESS) and not half.exists()


def test_a_mount_that_is_not_there_is_said_at_once(stage, tmp_path):
    result = stage(str(tmp_path / "nowhere" / "model"))
    assert result["refused"] and "There is no model folder" in result["msg"]


@pytest.fixture
def local_shell(tmp_path: Path) -> str:
    """A remote shell for rsync that stays here."""
    script = tmp_path / "rsh"
    script.write_text('#!/bin/sh\nshift\nexec "$@"\n')
    script.chmod(0o755)
    return str(script)


def needs(program: str) -> None:
    if shutil.which(program) is None:
        if os.environ.get("CI"):
            pytest.fail(f"{program} is missing on this machine")
        pytest.skip(f"needs {program}: apt-get install {program}")


def test_rsync_brings_a_model_goes_on_where_it_was_cut_off_and_follows_links(stage, origin, local_shell, tmp_path):
    needs("rsync")
    data = big_shard(origin)
    (tmp_path / "blob").write_bytes(data)
    (origin / SHARD).unlink()
    (origin / SHARD).symlink_to(tmp_path / "blob")  # as in a hub's cache
    half = Path(f"{stage.path}.staging-rsync")
    half.mkdir(parents=True)
    (half / SHARD).write_bytes(data[: len(data) // 2])
    result = stage(f"rsync:elsewhere:{origin}", rsync_shell=local_shell)
    assert not result.get("failed"), result
    assert same_files(stage.path, origin, USELESS) and not (stage.path / SHARD).is_symlink()
    assert stage(f"rsync:elsewhere:{origin}", rsync_shell=local_shell)["changed"] is False


def test_rsync_mends_a_beginning_that_is_not_the_sources(stage, origin, local_shell):
    needs("rsync")
    data = big_shard(origin)
    half = Path(f"{stage.path}.staging-rsync")
    half.mkdir(parents=True)
    (half / SHARD).write_bytes(b"?" * (len(data) // 2))
    assert not stage(f"rsync:elsewhere:{origin}", rsync_shell=local_shell).get("failed")
    assert (stage.path / SHARD).read_bytes() == data


def test_rsync_says_why_it_can_not_list(stage, local_shell, tmp_path):
    needs("rsync")
    result = stage(f"rsync:elsewhere:{tmp_path}/nowhere", rsync_shell=local_shell)
    assert result["refused"] and "can't be listed by rsync" in result["msg"]


def test_rclone_brings_a_model_and_its_sums_are_compared(stage, origin):
    needs("rclone")
    names = [p.name for p in origin.glob("*.safetensors")]
    sums = "".join(f"{checkpoint.sha256(str(origin / name))}  {name}\n" for name in names)
    (origin / "SHA256SUMS").write_text(sums)
    result = stage(f"rclone::local:{origin}", sha256=True)
    assert not result.get("failed"), result
    assert same_files(stage.path, origin, USELESS)
    (origin / "SHA256SUMS").write_text(sums.replace(sums[:64], "0" * 64))
    stage.path.rename(f"{stage.path}.old")
    result = stage(f"rclone::local:{origin}", sha256=True)
    assert result["failed"] and "SHA-256" in result["msg"] and not stage.path.exists()


def test_sums_that_are_asked_for_and_not_published_are_refused(stage, origin):
    result = stage(str(origin), sha256=True)
    assert result["refused"] and "SHA256SUMS" in result["msg"]


# Words and numbers


@pytest.mark.parametrize(
    ("text", "kind", "where", "revision"),
    [
        ("hf:moonshotai/Kimi-K2.5@main", "hub", "moonshotai/Kimi-K2.5", "main"),
        ("/mnt/models/x/", "path", "/mnt/models/x", ""),
        ("rsync://host/models/x/", "rsync", "rsync://host/models/x", ""),
        ("rsync:root@host:/models/x", "rsync", "root@host:/models/x", ""),
        ("rclone:s3:bucket/x", "rclone", "s3:bucket/x", ""),
        ("host:gpu01", "host", "gpu01", ""),
        ("host:gpu01:/models/x", "host", "gpu01:/models/x", ""),
        ("", "none", "", ""),
    ],
)
def test_a_source_is_read_as_it_is_written(text, kind, where, revision):
    assert staging_sources.parse(text) == staging_sources.Source(kind, where, revision)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("moonshotai/Kimi-K2.5", "hf:moonshotai/Kimi-K2.5@revision"),
        ("hf:moonshotai/Kimi-K2.5", "pins no revision"),
        ("hf:Kimi@main", "names no model"),
        ("models/x/y", "no source of a model"),
        ("rsync:--rsh=evil", "no source of a model"),
        ("rclone:-v:x", "no source of a model"),
        ("host:-x", "no source of a model"),
        ("host:gpu01:relative", "no source of a model"),
    ],
)
def test_what_is_no_source_is_refused_with_a_hint(text, hint):
    with pytest.raises(staging_sources.SourceError, match=hint):
        staging_sources.parse(text)


def test_a_listing_that_leads_out_of_the_folder_is_refused():
    with pytest.raises(staging_sources.SourceError, match="outside"):
        staging_sources.wanted({"../x.safetensors": staging_sources.File(1)}, [])


def test_other_formats_are_left_out_only_beside_safetensors():
    files = {name: staging_sources.File(1) for name in ("pytorch_model.bin", "config.json", "original/params.json")}
    assert sorted(staging_sources.wanted(files, ["original"])[0]) == ["config.json", "pytorch_model.bin"]
    files["model.safetensors"] = staging_sources.File(1)
    assert sorted(staging_sources.wanted(files, ["original"])[0]) == ["config.json", "model.safetensors"]


def test_files_are_spread_evenly_over_several_downloaders():
    sizes = {"a": 100, "b": 60, "c": 50, "d": 1}
    assert staging_sources.spread(sizes, 2) == [["a", "d"], ["b", "c"]] or staging_sources.spread(sizes, 2) == [
        ["a"],
        ["b", "c", "d"],
    ]
    assert staging_sources.spread({"a": 1}, 4) == [["a"]]


def test_the_rate_is_that_of_the_last_half_minute():
    rate = Rate(30.0)
    assert rate.add(0.0, 0) == 0.0
    assert rate.add(10.0, 1000) == 100.0
    assert rate.add(100.0, 1000) == 0.0


ROOT = Path(__file__).resolve().parents[2]


def test_the_role_hands_every_argument_on():
    tasks = (ROOT / "roles/model_staging/tasks/main.yml").read_text()
    given = {name for name in arguments.MODEL_STAGING if f"{name}: " in tasks}
    by_the_play = {"swarm", "timeout", "patience", "task"}
    assert given == set(arguments.MODEL_STAGING) - by_the_play
    specs = yaml.safe_load((ROOT / "roles/model_staging/meta/argument_specs.yml").read_text())
    options = specs["argument_specs"]["main"]["options"]
    for name in given - {"models", "phase", "pythons", "fan_out"}:
        assert options[f"model_staging_{name}"]["default"] == arguments.MODEL_STAGING[name]["default"], name


def test_the_programs_that_fetch_run_without_this_package():
    for name in staging_sources.CLIENTS:
        text = staging_sources.source_of(name)
        assert "from ." not in text and "gpu_host" not in text
