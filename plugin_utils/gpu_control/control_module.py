"""A module that works on the control node alone: no host is contacted, whatever the play says.

Its file in library/ documents it. Only this runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from ansible.plugins.action import ActionBase

from . import wrong_types


class ControlModule(ActionBase):
    """An action: `spec` says what it takes, `act` does it."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    spec: ClassVar[Mapping[str, dict[str, Any]]] = {}

    def run(self, tmp: None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        self.task_vars = task_vars or {}
        result: dict[str, Any] = super().run(tmp, self.task_vars)
        given = self.given()
        validated = ArgumentSpecValidator(self.spec).validate(given)
        params = validated.validated_parameters
        if problems := wrong_types.reworded(validated.error_messages, self.spec, given) or self.judge(params):
            return {**result, "failed": True, "refused": True, "msg": "Nothing was done. " + " ".join(problems)}
        return {**result, "changed": False, **self.act(params)}

    @property
    def check_mode(self) -> bool:
        return bool(self._task.check_mode)

    def given(self) -> dict[str, Any]:
        """The task's arguments."""
        return dict(self._task.args)

    def judge(self, params: dict[str, Any]) -> list[str]:
        """A sentence for each thing that is wrong before anything is read."""
        return []

    def act(self, params: dict[str, Any]) -> dict[str, Any]:
        """What the task returns."""
        raise NotImplementedError
