"""The hook on dirty hosts: told once, in time, and never at the cost of a verdict or a secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gpu_control import hooks, records

from .control_project import Project

DIRTY = {"verdict": "dirty", "reason": "GPU 7 is used by train.py (pid 99)"}
TOKEN = "t0p-s3cret-token"
KEEP = "import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read())"


def record(host: str = "gpu01", verdict: str = "dirty", **more: Any) -> dict[str, Any]:
    return records.record({"run_id": "r1", "verdict": verdict}, host) | more


class Receiver:
    """A webhook on loopback: what it was sent; ``answer`` decides what a request gets."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, str], bytes]] = []
        self.answer: Callable[[BaseHTTPRequestHandler], None] = lambda request: request.send_response(204)
        received = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                received.got.append((self.path, dict(self.headers), body))
                received.answer(self)
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/services/S3CRET/path"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    file.chmod(0o600)
    return str(file)


# ---- variables ----


def test_no_hook_is_no_problem():
    assert hooks.hook({}) is None and hooks.hook({"reset_hook": "", "reset_hook_on": ["dirty"]}) is None


def test_what_makes_sense_becomes_a_hook(token_file):
    assert hooks.hook({"reset_hook": ["true", "--x"]}) == hooks.Hook(command=("true", "--x"))
    url = {"reset_hook": "https://example.com:8443/x", "reset_hook_token_file": token_file, "reset_hook_timeout": "3"}
    made = hooks.hook(url | {"reset_hook_on": ["dirty", "unreachable"]})
    assert made == hooks.Hook((), url["reset_hook"], ("dirty", "unreachable"), token_file, 3.0)
    assert made is not None and made.place == "https://example.com:8443"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"reset_hook": "mail ops"}, "neither a command as a list of words"),
        ({"reset_hook": ["true", 5]}, "neither a command as a list of words"),
        ({"reset_hook": {"url": "x"}}, "neither a command as a list of words"),
        ({"reset_hook": ["/nonexistent/page"]}, "there is no program '/nonexistent/page'"),
        ({"reset_hook": "https://"}, "no URL that can be called"),
        ({"reset_hook": "https://x/a b"}, "no URL that can be called"),
        ({"reset_hook": "https://x:99999/"}, "no URL that can be called"),
        ({"reset_hook": "https://me:pw@x/"}, "has a user or password in its URL"),
        ({"reset_hook": ["true"], "reset_hook_on": ["clean"]}, "choose from dirty, unreachable, unknown"),
        ({"reset_hook": ["true"], "reset_hook_on": 5}, "choose from dirty, unreachable, unknown"),
        ({"reset_hook": ["true"], "reset_hook_timeout": 0.0}, None),
        ({"reset_hook": ["true"], "reset_hook_timeout": -1}, "give seconds up to 300"),
        ({"reset_hook": ["true"], "reset_hook_timeout": "soon"}, "give seconds up to 300"),
        ({"reset_hook": ["true"], "reset_hook_token_file": "/etc/hostname"}, "a command reads its own files"),
        ({"reset_hook": "http://x.example/", "reset_hook_token_file": "/x"}, "in the clear"),
        ({"reset_hook": "https://x/", "reset_hook_token_file": "/none"}, "/none can't be read: No such file"),
        ({"reset_hook": "https://x/", "reset_hook_token_file": "/etc/hostname"}, "type chmod 600 /etc/hostname"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_one_sentence(values, sentence):
    found = hooks.problems(values)
    assert len(found) == (0 if sentence is None else 1)
    assert sentence is None or sentence in found[0]


def test_an_empty_token_is_refused(token_file):
    Path(token_file).write_text("\n")
    assert "holds no token" in hooks.problems({"reset_hook": "https://x/", "reset_hook_token_file": token_file})[0]


# ---- telling ----


def test_a_command_gets_the_record_as_json_on_its_standard_input(tmp_path):
    kept = tmp_path / "kept"
    big = record(killed=[{"pid": n, "name": "x" * 100} for n in range(5000)])
    assert hooks.tell(hooks.Hook(command=(sys.executable, "-c", KEEP, str(kept))), big) == ""
    assert json.loads(kept.read_text()) == json.loads(json.dumps(big))


def test_a_command_need_not_read_what_it_is_given():
    big = record(killed=[{"name": "x" * 100}] * 5000)
    assert hooks.tell(hooks.Hook(command=("true",)), big) == ""


def test_a_command_that_fails_or_hangs_is_said_and_its_children_end_with_it(tmp_path):
    script = "import sys; print('first'); sys.exit('no route to\\x1b[2J pager')"
    failing = hooks.Hook(command=(sys.executable, "-c", script))
    assert hooks.tell(failing, record()) == f"{sys.executable} ended with 1: no route to?[2J pager"
    pid_file = tmp_path / "pid"
    hanging = hooks.Hook(command=("sh", "-c", f"sleep 600 & echo $! > {pid_file}; wait"), timeout=1.0)
    assert hooks.tell(hanging, record()) == "sh had not ended after 1 s and was killed"
    pid = int(pid_file.read_text())
    end = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_webhook_gets_the_record_and_the_token_of_its_file(receiver, token_file):
    told = hooks.Hook(url=receiver.url, token_file=token_file)
    assert hooks.tell(told, record()) == ""
    ((path, headers, body),) = receiver.got
    assert path == "/services/S3CRET/path" and json.loads(body)["host"] == "gpu01"
    assert headers["Authorization"] == f"Bearer {TOKEN}" and headers["Content-Type"] == "application/json"
    assert TOKEN.encode() not in body


def test_a_webhook_that_refuses_redirects_drips_or_is_not_there_is_said_without_its_secrets(receiver, token_file):
    told = hooks.Hook(url=receiver.url, token_file=token_file, timeout=1.0)
    receiver.answer = lambda request: request.send_response(500, receiver.url)
    said = [hooks.tell(told, record())]
    other = Receiver()

    def redirect(request: BaseHTTPRequestHandler) -> None:
        request.send_response(302)
        request.send_header("Location", other.url)

    receiver.answer = redirect
    said.append(hooks.tell(told, record()))
    release = threading.Event()

    def drip(request: BaseHTTPRequestHandler) -> None:
        while not release.wait(0.2):
            request.wfile.write(b"H")
        request.send_response(204)

    receiver.answer = drip
    said.append(hooks.tell(told, record()))
    release.set()
    other.server.shutdown()
    other.server.server_close()
    said.append(hooks.tell(hooks.Hook(url=f"http://127.0.0.1:{other.server.server_port}/S3CRET"), record()))
    place = receiver.url.removesuffix("/services/S3CRET/path")
    assert said[:3] == [
        f"{place} answered 500",
        f"{place} answered 302",
        f"{place} had not answered after 1 s",
    ]
    assert said[3].endswith("could not be reached: Connection refused")
    assert other.got == [] and "S3CRET" not in str(said) and TOKEN not in str(said)


def test_only_the_hosts_that_it_is_for_are_told_of_and_each_once(tmp_path):
    kept = tmp_path / "kept"
    told = hooks.Hook(command=(sys.executable, "-c", KEEP, str(kept)), on=("dirty", "unknown"))
    found = [
        record("a"),
        record("b", "unreachable"),
        record("c", "unknown"),
        record("d", "clean"),
        record("e", "skipped"),
        record("f", predicted=True),
        record("pve", guest="a"),
    ]
    said: list[str] = []
    hooks.tell_all(found, lambda host: told, said.append)
    assert sorted(json.loads(line)["host"] for line in kept.read_text().splitlines()) == ["a", "c"]
    assert said == []


def test_a_hook_that_is_broken_for_a_whole_round_is_given_up_and_all_is_said():
    said: list[str] = []
    found = [record(f"gpu{n}") for n in range(3 * hooks.AT_ONCE)]
    hooks.tell_all(found, lambda host: hooks.Hook(command=("false",)), said.append)
    assert len(said) == hooks.AT_ONCE + 1
    assert said[0].startswith("The hook of gpu0 failed: false ended with 1: it printed nothing.")
    assert said[0].endswith("Its verdict stands, and so does its record.")
    assert "was not called for 32 more hosts" in said[-1]


def test_a_hook_that_can_not_be_found_is_said_and_the_others_are_called(tmp_path):
    def find(host: str) -> hooks.Hook:
        if host == "a":
            raise hooks.HookProblem("reset_hook is\nodd.")
        return hooks.Hook(command=(sys.executable, "-c", KEEP, str(tmp_path / "kept")))

    said: list[str] = []
    hooks.tell_all([record("a"), record("b")], find, said.append)
    assert said == ["The hook of a was not called: reset_hook is odd."]
    assert (tmp_path / "kept").exists()


# ---- the play ----


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


def lines(project: Project) -> list[dict[str, Any]]:
    file = project.folder / "told"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_play_tells_of_its_dirty_hosts_with_the_record_that_it_wrote(project):
    command = [sys.executable, "-c", KEEP, "{{ playbook_dir }}/../told"]
    project.host("good", reset_hook=command)
    project.host("bad", DIRTY, reset_hook=command)
    project.host("gone", ansible_connection="ssh", ansible_host="127.0.0.1", ansible_port=1, reset_hook=command)
    outcome = project.play("-e", "reset_confirmed=true")
    assert outcome.status != 0
    assert lines(project) == [one for one in outcome.records if one["host"] == "bad"]
    both = project.play("-e", json.dumps({"reset_confirmed": True, "reset_hook_on": ["dirty", "unreachable"]}))
    assert sorted(one["host"] for one in lines(project)) == ["bad", "bad", "gone"], both.output
    checked = project.play("-e", "reset_confirmed=true", "--check")
    assert len(lines(project)) == 3, checked.output


def test_a_hook_that_fails_is_said_and_changes_neither_verdicts_nor_status(project):
    project.host("bad", DIRTY)
    alone = project.play()
    failing = project.play("-e", json.dumps({"reset_hook": ["false"]}))
    assert failing.status == alone.status
    assert "The hook of bad failed: false ended with 1" in " ".join(failing.output.split())
    assert [one["verdict"] for one in failing.records] == ["dirty", "dirty"]
    assert "Verdicts - dirty: bad" in failing.output


def test_a_hook_that_makes_no_sense_is_refused_before_the_host_is_touched(project):
    project.host("a", {"raise": "the host was touched"})
    outcome = project.play("-e", json.dumps({"reset_hook": "mail ops"}))
    assert outcome.status != 0
    assert "reset_hook is neither a command as a list of words" in " ".join(outcome.output.split())
    assert "the host was touched" not in outcome.output and outcome.records == []


def test_the_token_is_in_no_output_and_no_record(project, receiver, token_file):
    project.host("bad", DIRTY)
    variables = {"reset_hook": receiver.url, "reset_hook_token_file": token_file}
    outcome = project.play("-vvv", "-e", json.dumps(variables))
    assert [json.loads(body)["host"] for _path, _headers, body in receiver.got] == ["bad"]
    assert TOKEN not in outcome.output
    found = subprocess.run(["grep", "-rl", TOKEN, str(project.folder)], capture_output=True, text=True).stdout.split()
    assert found == [token_file] and os.environ.get("TOKEN") is None
