"""``python -m sglang.bench_serving``: a benchmark client that keeps one request waiting, and tries again for ever."""

from __future__ import annotations

if __name__ == "__main__":
    import re
    import sys
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
