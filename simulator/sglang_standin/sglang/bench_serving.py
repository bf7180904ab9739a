"""``python -m sglang.bench_serving``: the old name of sglang.benchmark.serving.

Without a data set it is a client that keeps one request waiting and tries again for ever.
"""

from __future__ import annotations

import sys


def keep_trying() -> None:
    import re
    import time
    import urllib.request

    given = dict(re.findall(r"--([\w-]+)[ =](\S+)", " ".join(sys.argv[1:])))
    base = given.get("base-url") or f"http://{given.get('host', '127.0.0.1')}:{given.get('port', '30000')}"
    body = b'{"text": "Once upon a time", "sampling_params": {"max_new_tokens": 64}}'
    while True:
        print("request sent", flush=True)
        try:
            request = urllib.request.Request(f"{base}/generate", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                answer.read()
        except OSError as error:
            print(f"request failed: {error}", flush=True)
        time.sleep(1)


if __name__ == "__main__":
    if "--dataset-path" in sys.argv:
        from sglang.benchmark.serving import cli_main

        cli_main()
    else:
        keep_trying()
