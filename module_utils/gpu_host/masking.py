"""Takes keys, tokens and passwords out of command lines, environments, logs and JSON before anybody sees them.

Names decide first (`--api-key X`, `HF_TOKEN=X`, `api_key='X'`, `"password": "X"`), then the shape of a value (a Hugging
Face token, a bearer header, a URL with a password in it). A name that merely counts tokens (`--max-total-tokens`,
`--tokenizer-path`) keeps its value: a masked argument is a lost fact. In doubt about a secret, it is masked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Callable

MASK = "***"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Words that make a name secret wherever they stand in it.
_SECRET_WORDS = _words(
    "password passwd passphrase passcode pwd secret secrets credential credentials apikey apikeys authorization"
)
# A name that ends in one of these tells where a secret lies, or something about it, not the secret.
_ABOUT = _words(
    "file files path paths dir folder size length len count limit type name format algorithm enabled required "
    "timeout expiry ttl header header_name prompt"
)
# `<word> token` is part of a language model's vocabulary or a measure, not a credential.
_TEXT_TOKEN = _words(
    "first last next per inter prev previous output input prompt draft bonus eos bos pad sep cls unk mask image img "
    "video audio vision special stop start begin end think thinking text sampled accepted target each one "
    "single new max min num total avg mean time ms us vocab hot media verified placeholder"
)
_TOKEN_OWNERS = _words(
    "hf hub huggingface hugging auth access api app bot bearer github gitlab gh refresh session id private personal "
    "security service account user admin wandb ngc secret deploy oauth jwt csrf"
)
_KEY_OWNERS = _words(
    "api access admin auth private secret signing encryption master license shared session service account ssh "
    "subscription client"
)
# `<word> key` looks something up; everything else that ends in `key` opens something.
_LOOKUP_KEY = _words(
    "sort cache primary foreign partition group routing route lookup hash state param parameter weight weights tensor "
    "module config dict map prefix metric label public row column field query missing unexpected block page rope "
    "attention lora adapter any no this that the a unknown invalid bad json object index header request"
)
# argparse accepts unique beginnings of these: `--api-k X` sets the key as well.
_KNOWN_OPTIONS = ("api-key", "admin-api-key", "ssl-keyfile-password", "hf-token")
_KNOWN_PLAIN = frozenset(("ssl-keyfile", "host", "h", "help"))

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_SEPARATORS = re.compile(r"[^A-Za-z0-9]+")


def is_secret_name(name: str) -> bool:
    """Whether what is stored under this option, variable or field is a secret."""
    words = [word.lower() for part in _SEPARATORS.split(name) for word in _CAMEL.split(part) if word]
    while words and words[-1].isdigit():  # API_KEY_2, TOKEN_1
        words.pop()
    if not words or words[-1] in _ABOUT:
        return False
    if any(word in _SECRET_WORDS or "password" in word for word in words):
        return True
    pairs = list(zip(words, words[1:]))
    if any((second in ("key", "keys") and first in _KEY_OWNERS) for first, second in pairs):
        return True
    if any((second in ("token", "tokens") and first in _TOKEN_OWNERS) for first, second in pairs):
        return words[-1] not in ("ids", "length", "limit")
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last == "token":
        return before not in _TEXT_TOKEN
    if last == "key":
        return bool(before) and before not in _LOOKUP_KEY
    return last in ("bearer", "hftoken", "authtoken", "accesstoken")


def _is_secret_option(name: str) -> bool:
    name = name.lower().replace("_", "-")
    if name in _KNOWN_PLAIN:
        return False
    if is_secret_name(name):
        return True
    return len(name) > 1 and any(
        known.startswith(name) and not any(plain.startswith(name) for plain in _KNOWN_PLAIN) for known in _KNOWN_OPTIONS
    )


# ---- values that are secret by their shape ----

_SHAPES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        # user:password@ and token@ in a URL
        (r"(?i)\b([a-z][a-z0-9+.-]{0,20}://)[^\s/?#'\"<>@]*(?:@[^\s/?#'\"<>@]*)*@", r"\1" + MASK + "@"),
        (r"\bhf_[A-Za-z0-9]{8,}", "hf_" + MASK),
        (r"\b(?:api_org_)[A-Za-z0-9]{8,}", MASK),
        (r"\bsk-[A-Za-z0-9_-]{12,}", "sk-" + MASK),
        (r"\b(?:ghp|gho|ghu|ghs|ghr)_[A-Za-z0-9]{16,}", MASK),
        (r"\bgithub_pat_[A-Za-z0-9_]{16,}", MASK),
        (r"\bglpat-[A-Za-z0-9_-]{12,}", MASK),
        (r"\bxox[abprs]-[A-Za-z0-9-]{8,}", MASK),
        (r"\bnvapi-[A-Za-z0-9_-]{12,}", MASK),
        (r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b", MASK),
        (r"\bAIza[A-Za-z0-9_-]{30,}", MASK),
        (r"\beyJ[A-Za-z0-9_-]{5,}\.[A-Za-z0-9_-]{5,}(?:\.[A-Za-z0-9_-]*)?", MASK),
        (r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}", r"\1 " + MASK),
        (r"(?s)-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(?:-----END \1-----|\Z)", MASK),
    )
)

# ---- name and value inside a text ----

# The opening quote may be escaped itself (JSON inside JSON); the closing one is then escaped likewise.
_QUOTED = (
    r"""(?P<esc>\\*)(?P<quote>["'])"""
    r"""(?P<quoted>(?:(?!(?P=esc)(?P=quote))(?:\\.|[^\\])|(?<=\\)\\)*)(?:(?P=esc)(?P=quote))?"""
)
_NAME = r"(?<![A-Za-z0-9_#-])(?P<name>[A-Za-z_][A-Za-z0-9_.-]{0,80})"
# name=value, name: value, 'name': value, \"name\": \"value\", (name, value) is not one of them
_ASSIGNMENT = re.compile(_NAME + r"(?P<link>\\*[\"']?\s?[=:]\s{0,2})(?=[^\s=:])")
_OPTION = re.compile(r"(?<![A-Za-z0-9_-])--?(?P<name>[A-Za-z][A-Za-z0-9_.-]{0,80})(?P<link>\\*[\"']?,?[ \t=]+)(?=\S)")
_QUOTED_AT = re.compile(_QUOTED, re.DOTALL)
_BARE_AT = re.compile(r"[^\s,;&)\]}\"']+")
_NEXT_OPTION_AT = re.compile(r"--[A-Za-z][A-Za-z0-9_-]*(?:[\s=]|$)")
_NOTHING_AT = re.compile(r"(?:None|null|True|False|true|false)(?![A-Za-z0-9_])")
_HEADER_AT = re.compile(r"(?i)(?:bearer|basic|token|digest)\s+")
_BRACKETS = {"[": "]", "(": ")", "{": "}"}


def mask_text(text: str) -> str:
    """A log, a message or a shell command line without its secrets. Everything else stays as it is."""
    text = _mask_named(text, _ASSIGNMENT, is_secret_name)
    text = _mask_named(text, _OPTION, _is_secret_option)
    for pattern, replacement in _SHAPES:
        text = pattern.sub(replacement, text)
    return text


def _mask_named(text: str, pattern: re.Pattern[str], secret: Callable[[str], bool]) -> str:
    parts: list[str] = []
    done = 0
    for match in pattern.finditer(text):
        if match.start() < done or not secret(match.group("name")):
            continue
        end = _value_end(text, match.end())
        if end is None:
            continue
        start, stop = end
        parts += [text[done:start], MASK]
        done = stop
    return "".join(parts) + text[done:] if parts else text


def _value_end(text: str, at: int) -> tuple[int, int] | None:
    """Where the value that begins at `at` starts and ends, without its quotes; None when there is nothing to hide."""
    if _NOTHING_AT.match(text, at) or _NEXT_OPTION_AT.match(text, at):
        return None
    if text.startswith(MASK, at):
        return None
    header = _HEADER_AT.match(text, at)
    if header:
        at = header.end()
    closing = _BRACKETS.get(text[at : at + 1])
    if closing:
        stop = _bracket_end(text, at, closing)
        return (at + 1, stop) if text[at + 1 : stop].strip() else None
    quoted = _QUOTED_AT.match(text, at)
    if quoted:
        start, stop = quoted.span("quoted")
        after = _HEADER_AT.match(text, start, stop)
        return (after.end() if after else start, stop) if stop > start else None
    bare = _BARE_AT.match(text, at)
    if not bare:
        return None
    stop = bare.end()
    while text[stop : stop + 1] in ('"', "'"):  # a shell word goes on behind a quoted part: a'b c'd
        part = _QUOTED_AT.match(text, stop)
        if part is None or not part.group("quoted"):
            break
        more = _BARE_AT.match(text, part.end())
        stop = more.end() if more else part.end()
    return at, stop


def _bracket_end(text: str, at: int, closing: str) -> int:
    """Index of the bracket that closes the one at `at`; quoted parts are skipped over. The end when none does."""
    opening, depth, here = text[at], 0, at
    while here < len(text):
        char = text[here]
        if char in "\"'":
            quoted = _QUOTED_AT.match(text, here)
            here = quoted.end() if quoted else here + 1
            continue
        if char == opening:
            depth += 1
        elif char == closing:
            depth -= 1
            if depth == 0:
                return here
        here += 1
    return len(text)


_ARGUMENT = re.compile(r"(?s)(?P<dashes>--?)?(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)=(?P<value>.*)")
_LONE_OPTION = re.compile(r"--?(?P<name>[A-Za-z][A-Za-z0-9_.-]*)")


def mask_argv(argv: Sequence[str]) -> tuple[str, ...]:
    """The same arguments, word for word, with secret values masked."""
    masked: list[str] = []
    value_follows = False
    for argument in argv:
        if value_follows and not _NEXT_OPTION_AT.match(argument):
            masked.append(MASK if argument else "")
            value_follows = False
            continue
        value_follows = False
        assignment = _ARGUMENT.fullmatch(argument)
        if assignment:
            name, value = assignment.group("name"), assignment.group("value")
            secret = _is_secret_option(name) if assignment.group("dashes") else is_secret_name(name)
            if secret:
                masked.append(argument[: len(argument) - len(value)] + (MASK if value else ""))
                continue
        option = _LONE_OPTION.fullmatch(argument)
        if option:
            value_follows = _is_secret_option(option.group("name"))
        masked.append(mask_text(argument))
    return tuple(masked)


def mask_environ(environ: Mapping[str, str]) -> dict[str, str]:
    """The same variables with secret values masked."""
    return {
        name: (MASK if value else "") if is_secret_name(name) else mask_text(value) for name, value in environ.items()
    }


def mask_value(value: Any) -> Any:
    """A JSON-like value (dicts, lists, texts) with secrets masked at any depth."""
    if isinstance(value, Mapping):
        return {
            key: MASK if is_secret_name(str(key)) and _hides(item) else mask_value(item) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [mask_value(item) for item in value]
    return mask_text(value) if isinstance(value, str) else value


def _hides(value: Any) -> bool:
    return value is not None and not isinstance(value, bool) and value not in ("", [], {}, ())
