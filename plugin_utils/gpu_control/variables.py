"""Variables of a play, read on the control node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible.errors import AnsibleError


def read(templar: Any, variables: Mapping[str, Any], name: str) -> Any:
    """The value of a variable that is there. Raises AnsibleError, which names it, where its template has none."""
    try:
        return templar.template(variables[name])
    except AnsibleError as error:
        raise AnsibleError(f"{name} is given as {variables[name]!r}, which has no value") from error  # Ansible adds why
