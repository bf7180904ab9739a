"""After converge: both jobs ran once, in their order, as the user that was named."""

from __future__ import annotations

from typing import Any

import pytest


def test_each_job_ran_once_after_the_one_that_it_follows_as_its_user_and_without_a_gpu(host: Any) -> None:
    lines = host.file("/srv/prompts/order").content_string.splitlines()
    assert lines == [f"{name} in /srv/prompts as engineer on GPUs ''" for name in ("shard", "merge")]


@pytest.mark.parametrize("name", ["shard", "merge"])
def test_what_a_job_says_is_in_its_log_and_in_the_journal(host: Any, name: str) -> None:
    said = f"{name} in /srv/prompts as engineer"
    assert said in host.file(f"/var/log/data-jobs/{name}.log").content_string
    assert said in host.check_output(f"journalctl --identifier=datajob-{name} --output=cat --no-pager")


def test_no_job_goes_on_and_none_failed(host: Any) -> None:
    running = host.check_output("systemctl list-units --plain --no-legend --state=running,failed 'datajob-*.service'")
    assert [line for line in running.splitlines() if "-log-" not in line] == []
