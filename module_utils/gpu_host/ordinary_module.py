"""What the files in library/ have in common: one call of gpu_host as an ordinary Ansible module.

It is used where the action plugin can't take its shorter way (see plugin_utils/gpu_control/host_module.py). Where it
does all of the work on the control node, the file documents it and runs only when the plugin is not found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Callable, NoReturn

from ansible.module_utils.basic import AnsibleModule


def main(
    spec: Mapping[str, Any],
    run: Callable[..., dict[str, Any]],
    *judges: Callable[[dict[str, Any]], list[str]],
    **more: Any,
) -> None:
    """Judge the parameters, run, exit with the result and ``more``."""
    module = AnsibleModule(argument_spec=dict(spec), supports_check_mode=True)
    for judge in judges:
        if problems := judge(module.params):
            module.fail_json(msg="Nothing was done. " + " ".join(problems), refused=True)
    module.exit_json(**run(module.params, check_mode=module.check_mode, diff=module._diff), **more)


def without_action_plugin(name: str) -> NoReturn:
    """The end of a module that has nothing to do on a host, whatever it was given."""
    text = f"{name} works on the control node: name this repository's action_plugins in ansible.cfg."
    print(json.dumps({"failed": True, "msg": text}))
    sys.exit(1)
