"""Requests to a server of a lab host, one after the other in several threads, until told to stop; who saw a failure."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

from tests.lab.command import wait_for
from tests.lab.host import Host

# python3 - URL THREADS TOKENS FILE: one line of JSON a request: when it was sent, when it ended, its status, its text's
# tokens. Ends when FILE.stop is there: what is under way is still waited for.
CLIENT = """
import json, os, sys, threading, time, urllib.error, urllib.request
url, threads, tokens, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
lock, out = threading.Lock(), open(path, "a", buffering=1)
def one():
    body = json.dumps({"text": "count", "sampling_params": {"max_new_tokens": tokens}}).encode()
    sent = time.time()
    try:
        with urllib.request.urlopen(urllib.request.Request(url + "/generate", body), timeout=60) as answer:
            status, made = answer.status, json.load(answer)["meta_info"]["completion_tokens"]
    except urllib.error.HTTPError as error:
        status, made = error.code, 0
    except Exception as error:
        status, made = str(error) or type(error).__name__, 0
    with lock:
        out.write(json.dumps({"sent": sent, "ended": time.time(), "status": status, "tokens": made}) + chr(10))
    return status == 200
def go():
    while not os.path.exists(path + ".stop"):
        if not one():
            time.sleep(0.1)
crew = [threading.Thread(target=go) for _ in range(threads)]
[one.start() for one in crew]
[one.join() for one in crew]
open(path + ".ended", "w").close()
"""


@dataclass(frozen=True)
class Sent:
    """One request, by the host's clock (seconds since 1970). ``status`` 200, another one, or the words of an error."""

    sent: float
    ended: float
    status: int | str
    tokens: int


class Traffic:
    """``with Traffic(host, url) as traffic: ...``; after the block ``requests`` are all that were ever sent."""

    def __init__(self, host: Host, url: str, threads: int = 3, tokens: int = 100) -> None:
        self._host, self._tokens = host, tokens
        self._file = f"/root/traffic-{time.monotonic_ns()}"
        host.write(f"{self._file}.py", CLIENT)
        self._command = f"python3 {self._file}.py {url} {threads} {tokens} {self._file}"
        self.requests: list[Sent] = []

    def __enter__(self) -> Traffic:
        self._host.start(self._command)
        wait_for(lambda: len(self.so_far()) >= 3, "the first answers", time.monotonic() + 60)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def so_far(self) -> list[Sent]:
        text = self._host.exec(["cat", self._file], check=False).stdout
        return [Sent(**json.loads(line)) for line in text.splitlines() if line.endswith("}")]

    def stop(self) -> None:
        """Send no more, and wait for the answers to what was sent."""
        self._host.exec(["touch", f"{self._file}.stop"])
        ended = ["test", "-e", f"{self._file}.ended"]
        wait_for(
            lambda: self._host.exec(ended, check=False).returncode == 0, "the last answers", time.monotonic() + 120
        )
        self.requests = self.so_far()

    def failed(self) -> list[Sent]:
        return [one for one in self.requests if one.status != 200 or one.tokens != self._tokens]
