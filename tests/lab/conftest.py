"""Fixtures: a lab for the whole run, and GPU hosts in it. A host boots in half a second, so each test gets its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.lab.host import Host
from tests.lab.image import LabUnavailableError
from tests.lab.lab import Lab, sweep


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "lab" in item.path.parts[-2:-1]:
            item.add_marker(pytest.mark.lab)


@pytest.fixture(scope="session")
def lab() -> Iterator[Lab]:
    """The lab of this run. Where it can't run, the tests are skipped with what to install; in CI they fail."""
    try:
        sweep()
        made = Lab.create(f"pytest-{os.getpid()}", owner=os.getpid())
    except LabUnavailableError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(str(error))
    with made:
        yield made


@pytest.fixture
def start_gpu_host(lab: Lab) -> Iterator[Callable[..., Host]]:
    """Starts hosts that are removed after the test; arguments as in `Lab.start_host`."""
    started: list[str] = []

    def start(name: str | None = None, **options: object) -> Host:
        host = lab.start_host(name or f"gpu-{len(lab.host_names()) + 1}", **options)
        started.append(host.name)
        return host

    yield start
    lab.stop_hosts(started)


@pytest.fixture
def gpu_host(start_gpu_host: Callable[..., Host]) -> Host:
    """A fresh host of 8 idle GPUs, removed after the test."""
    return start_gpu_host()


@pytest.fixture(scope="module")
def shared_gpu_host(lab: Lab) -> Iterator[Host]:
    """One host for a whole file of tests that only look."""
    host = lab.start_host("shared")
    yield host
    lab.stop_hosts(["shared"])
