"""The arguments: refused in one sentence each, and documented as they are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zlib
from importlib.util import MAGIC_NUMBER
from pathlib import Path

import pytest
import yaml
from ansible.module_utils.common.arg_spec import ArgumentSpecValidator
from gpu_control import host_modules, lean, role_readme, wrong_types
from gpu_host import arguments

ROOT = Path(__file__).resolve().parent.parent.parent
ROLES = sorted(path.parent.parent for path in ROOT.glob("roles/*/meta/argument_specs.yml"))
UUID = "GPU-12345678-1234-1234-1234-123456789abc"


def problems(spec: dict = arguments.GPU_RESET, **given) -> list[str]:
    validated = ArgumentSpecValidator(spec).validate(given)
    return validated.error_messages or arguments.problems(validated.validated_parameters)


def test_defaults_are_accepted():
    specs = (arguments.GPU_RESET, arguments.GPU_MEMORY, arguments.SERVER_INFO, arguments.DATA_JOBS)
    assert [problem for spec in specs for problem in problems(spec)] == []


@pytest.mark.parametrize(
    "given",
    [
        {"gpus": [0, "7", UUID, "0000:c1:00.0", "00000000:C1:00.0", "c1:00.0"]},
        {"grace": 0, "verify_timeout": 0.5, "free_mib": 0},
        {
            "server_modules": ["mycompany.serving.main"],
            "server_commands": ["my-server serve"],
            "server_titles": ["MyServer::*"],
        },
        {"ports": [30000], "bytecode_paths": ["/opt/sglang/python"], "scope_cgroup": "/lxc/101", "scope_folder": "/a/"},
        {"protected": ["my-exporter"], "run_id": "20260101T000000.000Z-abc"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_makes_sense_is_accepted(given):
    assert problems(**given) == []


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"phases": ["destroy"]}, "phases must be one or more of"),
        ({"phases": []}, "nothing is chosen"),
        ({"grace": -1}, "grace: -1.0 is no time to wait"),
        ({"verify_timeout": float("nan")}, "is no time to wait"),
        ({"kill_timeout": float("inf")}, "is no time to wait"),
        ({"free_mib": -5}, "free_mib: -5 is no amount of memory"),
        ({"gpus": ["0-3"]}, "'0-3' names no GPU"),
        ({"gpus": ["-1"]}, "'-1' names no GPU"),
        ({"gpus": ["GPU-123"]}, "'GPU-123' names no GPU"),
        ({"gpus": [f"{UUID}\n"]}, "names no GPU"),
        ({"ports": [0]}, "0 is no port"),
        ({"server_modules": ["python3"]}, "would match unrelated processes"),
        ({"server_modules": [".*"]}, "would match unrelated processes"),
        ({"server_modules": ["sglang"]}, "would match unrelated processes"),
        ({"server_modules": [""]}, "would match unrelated processes"),
        ({"server_commands": ["python3 -m"]}, "would match unrelated processes"),
        ({"server_commands": ["bash"]}, "would match unrelated processes"),
        ({"server_titles": ["*"]}, "would match unrelated processes"),
        ({"server_titles": ["::*"]}, "would match unrelated processes"),
        ({"server_modules": [], "server_commands": []}, "no server would be found"),
        ({"scope_cgroup": "/"}, "scope_cgroup: '/' is not an absolute path below /"),
        ({"scope_cgroup": "lxc/101"}, "is not an absolute path below /"),
        ({"scope_folder": "/"}, "scope_folder: '/' is not an absolute path below /"),
        ({"scope_folder": "/srv/../etc"}, "is not an absolute path below /"),
        ({"scope_folder": "/srv//a"}, "is not an absolute path below /"),
        ({"bytecode_paths": ["/"]}, "too wide to delete anything in"),
        ({"bytecode_paths": ["/usr"]}, "too wide to delete anything in"),
        ({"bytecode_paths": ["~/sglang"]}, "no absolute path"),
        ({"lock_folders": ["/home/../x/y"]}, "no absolute path"),
        ({"protected": ["/usr/bin/thing"]}, "no executable's file name"),
        ({"run_id": "../../etc/passwd"}, "would be no file name"),
        ({"gpu": ["1"]}, "Supported parameters include"),
        ({"repair": ["hammer"]}, "repair must be one or more of"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_would_do_harm_or_nothing_is_refused_in_one_sentence(given, sentence):
    found = problems(**given)
    assert len(found) == 1
    assert sentence in found[0]


def without_description(option: dict) -> dict:
    return {
        key: value for key, value in option.items() if key in ("type", "elements", "choices", "default", "required")
    }


def options(role: Path) -> dict:
    return yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]["main"]["options"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"grace": "abc"}, "grace is 'abc', not a number."),
        ({"free_mib": "1.5"}, "free_mib is '1.5', not a whole number."),
        ({"probe": "perhaps"}, "probe is 'perhaps', not true or false."),
        ({"gpus": {"0": 1}}, "gpus is {'0': 1}, not a list."),
        ({"ports": [30000, "http"]}, "ports holds 'http', not a whole number."),
        ({"jobs": [{"name": "a", "cpus": "many"}]}, "cpus of jobs is a value of type str, not a number."),
        ({"key": "s3cret"}, "key is a value of type str, not a whole number."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_value_of_the_wrong_type_is_named_without_classes_of_python(given, sentence):
    hidden = {"key": {"type": "int", "no_log": True}}
    spec = hidden if "key" in given else arguments.DATA_JOBS if "jobs" in given else arguments.GPU_RESET
    messages = ArgumentSpecValidator(spec).validate(given).error_messages
    assert wrong_types.reworded(messages, spec, given) == [sentence]


def test_what_is_not_about_types_stays_as_it_is():
    messages = ["phases must be one or more of: evidence. Got no match for: destroy"]
    assert wrong_types.reworded(messages, arguments.GPU_RESET, {"phases": ["destroy"]}) == messages


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_roles_defaults_are_those_of_its_argument_specs(role):
    specified = {name: option["default"] for name, option in options(role).items() if "default" in option}
    assert yaml.safe_load((role / "defaults/main.yml").read_text()) == specified


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_roles_readme_lists_its_variables_as_they_are(role):
    assert (role / "README.md").read_text() == role_readme.written(role), "run: make docs"


def test_the_role_has_a_variable_for_every_option_of_the_module_that_is_documented_alike():
    role = ROOT / "roles/gpu_reset"
    task = yaml.safe_load((role / "tasks/main.yml").read_text())[0]
    assert task["gpu_reset"] == {"role_variables": True}
    specified = options(role)
    for name in set(arguments.GPU_RESET) - set(host_modules.OF_ONE_CALL):
        assert without_description(specified[f"gpu_reset_{name}"]) == without_description(arguments.GPU_RESET[name])


@pytest.mark.parametrize("entry", ["reset", "memory_report", "server_state"])
def test_what_travels_to_a_host_is_complete_and_needs_nothing_but_pythons_standard_library(entry):
    sources = lean.modules(ROOT / "module_utils/gpu_host", entry)
    for name, text in sources.items():
        imported = re.findall(r"^\s*(?:import|from) ([A-Za-z_]\w*)", text, re.MULTILINE)
        assert set(imported) <= set(sys.stdlib_module_names) | {"pynvml"}, name
    # The program itself proves that nothing is missing: a run() that is given nothing fails by a missing parameter.
    program = lean.program(lean.sources(ROOT / "module_utils/gpu_host", entry), entry, {}, check_mode=True, diff=False)
    done = subprocess.run([sys.executable, "-I", "-c", lean.BOOTSTRAP], input=program, capture_output=True, timeout=60)
    result = lean.result(done.returncode, done.stdout.decode(), done.stderr.decode(), sys.executable)
    assert "KeyError" in result["msg"], result


def test_a_program_that_is_kept_on_a_host_is_the_same_whoever_builds_it() -> None:
    folder = ROOT / "module_utils/gpu_host"
    build = f"lean.kept(Path({str(folder)!r}), 'watch_look', {{}})['program']"
    code = f"from pathlib import Path; from gpu_control import lean; print({build}, end='')"
    environment = {"PYTHONPATH": str(ROOT / "plugin_utils")}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout == lean.kept(folder, "watch_look", {})["program"]


@pytest.mark.parametrize(("magic", "from_what"), [(MAGIC_NUMBER, "compiled"), (b"other", "text")])
def test_only_a_host_of_the_same_python_takes_what_was_compiled_here(
    magic: bytes, from_what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lean, "MAGIC_NUMBER", magic.ljust(len(MAGIC_NUMBER), b"-")[: len(MAGIC_NUMBER)])
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "call.py").write_text("def run(params, **_):\n    return {'from': 'compiled'}\n")
    built = lean.sources(tmp_path, "call")
    text = zlib.decompress(built)
    head, _, rest = text.partition(b"\0")
    files, _, compiled = rest.partition(b"\0")
    changed = zlib.compress(b"\0".join((head, files.replace(b"'compiled'", b"'text'"), compiled)))
    program = lean.program(changed, "call", {}, check_mode=False, diff=False)
    done = subprocess.run([sys.executable, "-I", "-c", lean.BOOTSTRAP], input=program, capture_output=True, timeout=60)
    assert json.loads(done.stdout) == {"from": from_what}


def test_the_sources_are_built_once_a_run(tmp_path):
    package = tmp_path / "gpu_host"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "reset.py").write_text("from . import other")
    built = lean.cached_sources(package, "reset", tmp_path)
    (package / "other.py").write_text("")
    assert lean.cached_sources(package, "reset", tmp_path) == built
    assert lean.cached_sources(package, "reset", tmp_path / "missing") != built


@pytest.mark.parametrize(
    "stdout", ['{"a": 1}\n', 'Welcome to gpu01 {x}\n{"not": "it"}\n{"a": 1}\n', '{"a": 1}\nShared connection closed.\n']
)
def test_a_result_is_found_among_what_logins_print(stdout):
    assert lean.result(0, stdout, "", "/usr/bin/python3") == {"a": 1}


def test_no_result_is_an_error_that_ends_with_what_was_printed_last():
    told = lean.result(139, "[1, 2]\n", "loading\nSegmentation fault\n\n", "/usr/bin/python3")
    assert told["failed"] is True
    assert told["msg"].startswith("The module returned no result, exit status 139: Segmentation fault.")
