"""``python -m sglang.benchmark.serving``: SGLang's benchmark client, as far as a measurement uses it.

Options, order of events, report and its odd parts (the bare Infinity) are those of 0.5.23; what is missing is every
other backend and data set, and a real tokenizer: words are tokens here. SGLANG_STANDIN_CLIENT chooses what goes wrong:
import, exit, silent (no report), nan, cut, twice, missing, slow (never ends); SGLANG_STANDIN_CLIENT_PAUSE how many
seconds pass between the flush and the first request (default 1, as in the real one).
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import statistics
import sys
import time
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

FAULT = os.environ.get("SGLANG_STANDIN_CLIENT", "")
PAUSE = float(os.environ.get("SGLANG_STANDIN_CLIENT_PAUSE", "1"))
if FAULT == "import":
    raise ModuleNotFoundError("No module named 'aiohttp'", name="aiohttp")


@dataclass
class DatasetRow:
    prompt: str
    prompt_len: int
    output_len: int


@dataclass
class RequestFuncOutput:
    generated_text: str = ""
    success: bool = False
    latency: float = 0.0
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)
    prompt_len: int = 0
    error: str = ""
    output_len: int = 0
    start_time: float = 0.0
    spec_accept_length: float = 0.0


def get_auth_headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


class Server:
    """Where the requests go."""

    def __init__(self, base_url: str) -> None:
        where = urllib.parse.urlsplit(base_url)
        self.host, self.port = where.hostname or "127.0.0.1", where.port or 30000

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=6 * 3600)

    def ask(self, method: str, path: str) -> tuple[int, Any]:
        connection = self.connect()
        try:
            connection.request(method, path, headers=get_auth_headers())
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        try:
            return answer.status, json.loads(body)
        except ValueError:
            return answer.status, None

    def generate(self, args: argparse.Namespace, row: DatasetRow, output_len: int) -> RequestFuncOutput:
        output = RequestFuncOutput(prompt_len=row.prompt_len)
        body = {
            "text": row.prompt,
            "sampling_params": {
                "temperature": args.temperature,
                "max_new_tokens": output_len,
                "ignore_eos": not args.disable_ignore_eos,
            },
            "stream": True,
        }
        connection = self.connect()
        began = output.start_time = time.perf_counter()
        try:
            headers = {"Content-Type": "application/json", **get_auth_headers()}
            connection.request("POST", "/generate", json.dumps(body), headers)
            answer = connection.getresponse()
            if answer.status != 200:
                output.error = f"{answer.reason}: {answer.read().decode()}"
                return output
            self._stream(answer, output, began)
            output.success = True
        except (OSError, http.client.HTTPException, ValueError) as error:
            output.error = f"Traceback (most recent call last):\n{type(error).__name__}: {error}"
        finally:
            connection.close()
        return output

    @staticmethod
    def _stream(answer: http.client.HTTPResponse, output: RequestFuncOutput, began: float) -> None:
        last, last_len, ended = began, 0, False
        for line in answer:
            chunk = line.strip()
            if not chunk:
                continue
            output.latency = time.perf_counter() - began
            if chunk == b"data: [DONE]":
                ended = True
                continue
            data = json.loads(chunk[len(b"data: ") :])
            meta = data["meta_info"]
            output.spec_accept_length = meta.get("spec_accept_length") or output.spec_accept_length
            now, count = time.perf_counter(), meta["completion_tokens"]
            if output.ttft == 0.0:
                output.ttft = now - began
            elif count > last_len:
                output.itl += [(now - last) / (count - last_len)] * (count - last_len)
            output.generated_text, output.output_len = data["text"], count
            last, last_len = now, count
        if not ended:
            raise ValueError("Response payload is not completed")


def read_dataset(args: argparse.Namespace) -> list[DatasetRow]:
    with open(args.dataset_path) as file:
        dataset = json.load(file)
    pairs = [one["conversations"][:2] for one in dataset if len(one.get("conversations", [])) >= 2]
    random.shuffle(pairs)
    rows: list[DatasetRow] = []
    for question, answer in pairs:
        if len(rows) == args.num_prompts:
            break
        prompt = question["value"]
        if args.apply_chat_template:
            prompt = f"<|user|> {prompt} <|assistant|>"
        length = len(prompt.split())
        output = args.sharegpt_output_len or len(answer["value"].split())
        if args.sharegpt_context_len and length + output > args.sharegpt_context_len:
            continue
        rows.append(DatasetRow(prompt, length, output))
    return rows


def calculate_metrics(
    input_requests: list[DatasetRow], outputs: list[RequestFuncOutput], dur_s: float
) -> tuple[dict[str, Any], list[int]]:
    done = [one for one in outputs if one.success]
    lengths = [one.output_len if one.success else 0 for one in outputs]
    tokens = sum(lengths)
    read = sum(row.prompt_len for row, one in zip(input_requests, outputs) if one.success)
    metrics: dict[str, Any] = {
        "duration": dur_s,
        "completed": len(done),
        "total_input_tokens": read,
        "total_input_text_tokens": read,
        "total_input_vision_tokens": 0,
        "total_output_tokens": tokens,
        "total_output_tokens_retokenized": tokens,
        "request_throughput": len(done) / dur_s,
        "input_throughput": read / dur_s,
        "output_throughput": tokens / dur_s,
        "total_throughput": (read + tokens) / dur_s,
    }
    times = {
        "e2e_latency": [one.latency for one in done],
        "ttft": [one.ttft for one in done],
        "tpot": [(one.latency - one.ttft) / (one.output_len - 1) for one in done if one.output_len > 1],
        "itl": [gap for one in done for gap in one.itl],
    }
    for name, values in times.items():
        values = sorted(values) or [0.0]
        metrics[f"mean_{name}_ms"] = 1000 * statistics.fmean(values)
        metrics[f"median_{name}_ms"] = 1000 * statistics.median(values)
        metrics[f"std_{name}_ms"] = 1000 * statistics.pstdev(values)
        for percent in (90, 95, 99):
            metrics[f"p{percent}_{name}_ms"] = 1000 * percentile(values, percent)
    metrics["concurrency"] = sum(times["e2e_latency"]) / dur_s
    return metrics, lengths


def percentile(values: list[float], percent: float) -> float:
    """Of sorted values, as NumPy's."""
    place = (len(values) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def benchmark(args: argparse.Namespace, server: Server, rows: list[DatasetRow]) -> dict[str, Any]:
    concurrency = args.max_concurrency or len(rows)
    print(f"Starting warmup with {args.warmup_requests} sequences...")
    with ThreadPoolExecutor(concurrency) as pool:
        first = rows[0]
        warm = list(
            pool.map(lambda _: server.generate(args, first, min(first.output_len, 32)), range(args.warmup_requests))
        )
        if args.warmup_requests and not any(one.success for one in warm):
            raise ValueError(
                f"Warmup failed - Please make sure benchmark arguments are correct. Error: {warm[0].error}"
            )
        print(f"Warmup completed with {args.warmup_requests} sequences. Starting main benchmark run...")
        if args.flush_cache:
            status, _ = server.ask("POST", "/flush_cache")
            if status != 200:
                raise OSError(f"{status} Client Error: Bad Request for url: {args.base_url}/flush_cache?timeout=60.0")
        time.sleep(PAUSE)
        began = time.perf_counter()
        outputs = []
        for output in pool.map(lambda row: server.generate(args, row, row.output_len), rows):
            outputs.append(output)
            seconds = time.perf_counter() - began
            sys.stderr.write(f"\r  {100 * len(outputs) // len(rows)}%|| {len(outputs)}/{len(rows)} [{seconds:.0f}s]")
            sys.stderr.flush()
    while FAULT == "slow":
        time.sleep(1)
    status, info = server.ask("GET", "/server_info")
    states = (info or {}).get("internal_states") or [{}]
    seconds = time.perf_counter() - began
    metrics, lengths = calculate_metrics(rows, outputs, seconds)
    result = {
        "tag": None,
        "backend": args.backend,
        "dataset_name": args.dataset_name,
        "request_rate": float("inf"),
        "max_concurrency": args.max_concurrency,
        "sharegpt_output_len": args.sharegpt_output_len,
        "random_input_len": 1024,
        "random_output_len": 1024,
        "random_range_ratio": 0.0,
        "server_info": info if status == 200 else None,
        **metrics,
        "accept_length": states[0].get("avg_spec_accept_length"),
        "max_output_tokens_per_s": 0.0,
        "max_concurrent_requests": concurrency,
    }
    if args.output_details:
        result.update(
            input_lens=[one.prompt_len for one in outputs],
            output_lens=lengths,
            ttfts=[one.ttft for one in outputs],
            itls=[one.itl for one in outputs],
            generated_texts=[one.generated_text for one in outputs],
            errors=[one.error for one in outputs],
        )
    return result


def write(path: str, result: dict[str, Any]) -> None:
    if FAULT == "nan":
        result["mean_itl_ms"] = float("nan")
    if FAULT == "missing":
        del result["median_ttft_ms"]
    line = json.dumps(result) + "\n"
    with open(path, "a") as file:
        file.write(line[: len(line) // 2] if FAULT == "cut" else line * 2 if FAULT == "twice" else line)


def cli_main() -> None:
    parser = argparse.ArgumentParser(description="Benchmark the online serving throughput.")
    for name in ("--backend", "--base-url", "--host", "--dataset-name", "--dataset-path", "--model", "--tokenizer"):
        parser.add_argument(name, default="")
    for name in ("--num-prompts", "--sharegpt-output-len", "--sharegpt-context-len", "--max-concurrency", "--port"):
        parser.add_argument(name, type=int, default=None)
    parser.add_argument("--warmup-requests", type=int, default=1)
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--output-file", default="")
    for name in ("--output-details", "--flush-cache", "--apply-chat-template", "--disable-ignore-eos"):
        parser.add_argument(name, action="store_true")
    args = parser.parse_args()
    print(f"benchmark_args={args}")
    if FAULT == "exit":
        raise RuntimeError("the client was told to fail")
    random.seed(args.seed)
    result = benchmark(args, Server(args.base_url), read_dataset(args))
    if FAULT != "silent":
        write(args.output_file, result)


if __name__ == "__main__":
    cli_main()
