"""What a command line runs, and the name that people read."""
from __future__ import annotations

import pytest
from gpu_host.command_line import Program, program, short_name


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ("python -m sglang.launch_server --api-key s3cret", "python -m sglang.launch_server"),
        ("/usr/bin/python3 -B /a/b/train.py --token s3cret", "python3 train.py"),
        ("python /x/torch/_inductor/compile_worker/__main__.py --workers=8", "python compile_worker"),
        ("/usr/bin/bash /opt/loop.sh s3cret", "bash loop.sh"),
        ("/usr/bin/bash -c s3cret", "bash"),
        ("/usr/bin/curl http://user:s3cret@host/", "curl"),
        ("/venv/bin/sglang serve --api-key s3cret", "sglang serve"),
        ("mysql s3cret", "mysql"),
        ("sglang::scheduler_TP0", "sglang::scheduler_TP0"),
    ],
)
def test_a_name_says_what_runs_and_no_secret(argv: str, name: str) -> None:
    assert short_name(tuple(argv.split())) == name


def test_a_spawned_child_is_named_by_what_it_is() -> None:
    assert short_name(("python", "-c", "from multiprocessing.spawn import spawn_main; spawn_main()")) == (
        "python multiprocessing.spawn"
    )


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("python -um a.b x y", Program(module="a.b", arguments=("x", "y"))),
        ("python -X dev -Wignore -m a.b", Program(module="a.b")),
        ("python --check-hash-based-pycs always run.py z", Program(script="run.py", arguments=("z",))),
        ("python -ma.b", Program(module="a.b")),
        ("python -", Program(script="-")),
        ("python", Program()),
        ("python -m", Program()),
        ("python3.13t run.py", Program(script="run.py")),
        ("pythonic run.py", Program(script="pythonic", arguments=("run.py",))),
        ("", Program()),
    ],
)
def test_the_interpreters_own_options_are_taken_off(argv: str, expected: Program) -> None:
    assert program(tuple(argv.split())) == expected
