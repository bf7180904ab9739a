"""Ansible's sentences about values of the wrong type, said in words that name the value and not a class of Python."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from ansible.module_utils.common.parameters import DEFAULT_TYPE_VALIDATORS

_VALUE = re.compile(
    r"argument '(?P<name>\w+)' is of type (?P<type>.+?)(?: found in '(?P<within>[^']*)'\.)?"
    r" and we were unable to convert to (?P<wanted>\w+): "
)
_ELEMENT = re.compile(
    r"Elements value for option '(?P<name>\w+)'(?: found in '(?P<within>[^']*)')? is of type (?P<type>.+?)"
    r" and we were unable to convert to (?P<wanted>\w+): "
)
_WORDS = {
    "float": "a number",
    "int": "a whole number",
    "bool": "true or false",
    "list": "a list",
    "dict": "a mapping of names to values",
    "str": "text",
}


def reworded(messages: Iterable[str], spec: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]) -> list[str]:
    """The messages of an ArgumentSpecValidator for `spec` on `given`; those that are not about types stay as they are.

    The value of an option with no_log is not shown.
    """
    return [_reworded(message, spec, given) for message in messages]


def _reworded(message: str, spec: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]) -> str:
    is_element = False
    found = _VALUE.match(message)
    if found is None:
        found, is_element = _ELEMENT.match(message), True
    if found is None or found["wanted"] not in _WORDS:
        return message
    name, wanted = found["name"], found["wanted"]
    where = f"{name} of {found['within']}" if found["within"] else name
    shown = f"a value of type {found['type']}"
    if not found["within"] and name in given and not spec.get(name, {}).get("no_log"):
        value = _wrong_element(given[name], wanted) if is_element else given[name]
        shown = shown if value is None else _plain(value)
    return f"{where} {'holds' if is_element else 'is'} {shown}, not {_WORDS[wanted]}."


def _wrong_element(values: Any, wanted: str) -> Any:
    """The first entry of a list that can't be converted."""
    for value in values.split(",") if isinstance(values, str) else values if isinstance(values, list) else ():
        try:
            DEFAULT_TYPE_VALIDATORS[wanted](value)
        except (TypeError, ValueError):
            return value
    return None


def _plain(value: Any) -> str:
    """As a person would write it, at a bearable length."""
    text = repr(str(value) if isinstance(value, str) else value)
    return text if len(text) <= 80 else f"{text[:77]}..."
