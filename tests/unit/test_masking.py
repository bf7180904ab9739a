from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from gpu_host import masking
from hypothesis import given
from hypothesis import strategies as st

CASES = yaml.safe_load((Path(__file__).parent / "cases/masking.yml").read_text())


@pytest.mark.parametrize("case", [c for c in CASES if "argv" in c], ids=lambda c: " ".join(c["argv"])[:60])
def test_a_command_line_shows_everything_but_its_secrets(case: dict) -> None:
    assert list(masking.mask_argv(case["argv"])) == case.get("shown", case["argv"])


@pytest.mark.parametrize("case", [c for c in CASES if "text" in c], ids=lambda c: c["text"][:60])
def test_a_text_shows_everything_but_its_secrets(case: dict) -> None:
    shown = masking.mask_text(case["text"])
    assert shown == case.get("shown", case["text"])
    assert "S3CR3T" not in shown
    assert masking.mask_text(shown) == shown, "masking twice changes nothing more"


RECORDED_SERVER_ARGS = (Path(__file__).parent / "cases/server_args.log").read_text().splitlines()


@pytest.mark.parametrize("line", RECORDED_SERVER_ARGS, ids=lambda line: line[:40])
def test_a_recorded_server_args_line_without_a_key_stays_as_it_is(line: str) -> None:
    assert masking.mask_text(line) == line


@pytest.mark.parametrize("line", RECORDED_SERVER_ARGS, ids=lambda line: line[:40])
@pytest.mark.parametrize("secret", ["abc", "a'b", 'a"b', "a\\", "x, port=1", "üß\n"])
def test_a_key_in_a_recorded_server_args_line_is_masked_and_nothing_else(line: str, secret: str) -> None:
    with_key = line.replace(" api_key=None", f" api_key={secret!r}").replace(
        '"api_key": null', f'"api_key": {json.dumps(secret)}'
    )
    assert with_key != line
    quote = '"' if '"api_key"' in line or repr(secret)[0] == '"' else "'"
    expected = line.replace(" api_key=None", f" api_key={quote}***{quote}").replace(
        '"api_key": null', '"api_key": "***"'
    )
    assert masking.mask_text(with_key) == expected


# Characters that never stand at the edge of what encloses a value; the core is what must not be found again.
CORE = "Zq9Zq9"
AROUND = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",), exclude_characters="\0"), max_size=12)
SECRETS = st.builds(lambda a, b: a + CORE + b, AROUND, AROUND)
NAMES = st.sampled_from(
    [
        "api-key",
        "admin-api-key",
        "hf-token",
        "token",
        "password",
        "db-password",
        "client-secret",
        "ssl-keyfile-password",
        "openai-key",
    ]
)


@given(NAMES, SECRETS)
def test_no_secret_argument_is_ever_shown(name: str, secret: str) -> None:
    argv = ["python", "-m", "sglang.launch_server", f"--{name}={secret}", "--tp", "8"]
    assert CORE not in "".join(masking.mask_argv(argv))
    if not secret.startswith("--"):
        apart = ["python", f"--{name}", secret, "--tp", "8"]
        assert masking.mask_argv(apart) == ("python", f"--{name}", "***", "--tp", "8")


@given(NAMES, SECRETS)
def test_no_secret_in_python_or_json_notation_is_ever_shown(name: str, secret: str) -> None:
    field = name.replace("-", "_")
    for text in (
        f"ServerArgs(tp_size=8, {field}={secret!r}, port=30000)",
        repr({"tp": 8, field: secret, "port": 1}),
        repr(["python", f"--{name}", secret, "--tp"]) if not secret.startswith("--") else "",
        json.dumps({"tp": 8, field: secret, "port": 1}),
        json.dumps({"inner": json.dumps({field: secret, "port": 1})}),
    ):
        shown = masking.mask_text(text)
        assert CORE not in shown
        assert "port" not in text or "port" in shown, "what follows the secret stays"


@given(NAMES, SECRETS)
def test_no_secret_variable_is_ever_shown(name: str, secret: str) -> None:
    variable = name.replace("-", "_").upper()
    assert masking.mask_environ({variable: secret, "NCCL_PROTO": "LL"}) == {variable: "***", "NCCL_PROTO": "LL"}
    assert masking.mask_value({"a": [{variable: secret, "b": 1}]}) == {"a": [{variable: "***", "b": 1}]}


@given(st.text(max_size=200))
def test_any_text_can_be_masked_and_a_second_time_changes_nothing(text: str) -> None:
    once = masking.mask_text(text)
    assert masking.mask_text(once) == once


def test_a_long_line_is_masked_quickly() -> None:
    import time

    line = "x" * 200_000 + " api_key='" + "\\'" * 50_000 + " " + "a=b " * 50_000 + "http://" + "@" * 20_000
    started = time.monotonic()
    masking.mask_text(line)
    assert time.monotonic() - started < 5
