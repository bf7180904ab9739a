"""Lists and fetches a model of a Hugging Face hub. A program of its own.

It runs on a Python that has huggingface_hub, as ``python hub_client.py REQUEST``, and imports nothing of this package.
The request is a JSON file: `do` (list, xet or http), `repository`, `revision`, `answer` (the file that takes the
outcome), and for xet and http `folder`, `files` (name -> size in bytes) and `parallel`. The hub's address and the token
are in the environment (HF_ENDPOINT, HF_TOKEN_PATH), so that the token is on no command line.

`xet` is the hub's own snapshot_download. It is fast, but begins a file anew that was cut off. `http` resumes within a
file: what has come of it lies beside it as <name>.part.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

PART = ".part"


def say(path: str, value: dict[str, Any]) -> None:
    """Replace the answer file as a whole."""
    passing = f"{path}.{os.getpid()}.new"
    with open(passing, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(passing, path)


def listing(request: dict[str, Any]) -> dict[str, Any]:
    """The commit behind the revision, and every file with its size and, where the hub knows it, its SHA-256."""
    from huggingface_hub import HfApi

    api = HfApi()
    commit = api.repo_info(request["repository"], revision=request["revision"], timeout=30).sha
    files, xet = {}, False
    for entry in api.list_repo_tree(request["repository"], recursive=True, revision=commit):
        if not hasattr(entry, "size"):
            continue  # a folder
        large = entry.lfs
        sha256 = large.get("sha256") if isinstance(large, dict) else getattr(large, "sha256", None)
        files[entry.path] = {"size": entry.size, "sha256": sha256}
        xet = xet or bool(getattr(entry, "xet_hash", None))
    return {"commit": commit, "files": files, "xet": xet and importlib.util.find_spec("hf_xet") is not None}


def snapshot(request: dict[str, Any]) -> dict[str, Any]:
    """The files by snapshot_download."""
    from huggingface_hub import snapshot_download

    snapshot_download(
        request["repository"],
        revision=request["revision"],
        local_dir=request["folder"],
        allow_patterns=[name.replace("[", "[[]") for name in request["files"]],
        max_workers=request["parallel"],
    )
    return {}


def over_http(request: dict[str, Any]) -> dict[str, Any]:
    """The files one by one, each from where its part ends. One that fails does not stop the others."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    # Bytes that reach the disk at once: with its own 10 MB a slow transfer looks like a stalled one.
    constants.DOWNLOAD_CHUNK_SIZE = 1 << 20
    headers = build_hf_headers()

    def fetch(name: str) -> None:
        size = request["files"][name]
        path = os.path.join(request["folder"], name)
        if os.path.isfile(path) and os.stat(path).st_size == size:
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        url = hf_hub_url(request["repository"], name, revision=request["revision"])
        with open(path + PART, "ab") as file:
            there = file.tell()
            if there > size:
                there = 0
                file.truncate(0)
            if there < size or not size:
                http_get(url, file, resume_size=there, headers=headers, expected_size=size)
            file.flush()
            got = os.fstat(file.fileno()).st_size
        if got != size:
            os.unlink(path + PART)
            raise OSError(f"{name} came with {got} bytes instead of {size}")
        os.replace(path + PART, path)

    with ThreadPoolExecutor(max_workers=request["parallel"]) as pool:
        outcomes = [pool.submit(fetch, name) for name in request["files"]]
    for outcome in outcomes:
        outcome.result()
    return {}


def trouble(error: BaseException, request: dict[str, Any]) -> dict[str, Any]:
    """What went wrong in one sentence, and whether trying again is of no use. Told by the classes' names, which have
    been the same over all versions of the hub's client."""
    names = {one.__name__ for one in type(error).__mro__}
    repository, revision = request["repository"], request["revision"]
    status = getattr(getattr(error, "response", None), "status_code", None)
    token = "the token" if os.environ.get("HF_TOKEN_PATH") else "nobody without a token"
    final = ""
    if "GatedRepoError" in names:
        final = f"{repository} is gated: accept its terms on the hub with the account of the token."
    elif "RevisionNotFoundError" in names:
        final = f"{repository} has no revision {revision}; correct it in the model's source."
    elif "RepositoryNotFoundError" in names:
        final = f"The hub has no model {repository}, or {token} may see it; correct the source or the token file."
    elif status in (401, 403):
        final = f"The hub refuses {repository} (HTTP {status}): check the token file."
    elif "HFValidationError" in names:
        final = f"{repository!r} is no model of a hub: {error}"
    if final:
        return {"error": final, "permanent": True}
    first = (str(error).strip().splitlines() or [""])[0]
    return {"error": f"{type(error).__name__}: {first}"[:500], "permanent": False}


def main(path: str) -> int:
    with open(path, encoding="utf-8") as file:
        request = json.load(file)
    work = {"list": listing, "xet": snapshot, "http": over_http}[request["do"]]
    try:
        say(request["answer"], work(request))
    except Exception as error:
        say(request["answer"], trouble(error, request))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
