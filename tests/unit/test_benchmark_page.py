"""report.html in a real browser: no errors, nothing asked for, readable on a phone and in print."""

from __future__ import annotations

import os
import re

import pytest
from gpu_benchmark import report

from tests import browser

from . import benchmark_run
from .test_benchmark_report import NOT_MEASURED

pytestmark = pytest.mark.skipif(
    browser.path() is None and not os.environ.get("CI"), reason="no Chromium: apt-get install chromium"
)
# What has to fit: nothing sticks out of the page to the right, and no text is smaller than people read.
OVERFLOW = """
[...document.querySelectorAll('body *')].filter(one => !one.closest('thead') && one.getBoundingClientRect().right >
  document.documentElement.clientWidth + 1).map(one => one.tagName + ' ' + one.textContent.slice(0, 40))
"""
SMALLEST = """
Math.min(...[...document.querySelectorAll('p, li, td, dd, code, pre, svg text')].filter(one => one.textContent.trim())
  .map(one => one.closest('svg') ? one.getBoundingClientRect().height / 1.2
    : parseFloat(getComputedStyle(one).fontSize)))
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """A report with everything in it: a failed variant, a comparison, long words."""
    folder = tmp_path_factory.mktemp("artifacts")
    before = benchmark_run.make(folder, "before", slower=1 / 1.1, seed=9)
    long = "/opt/" + "a-very-long-folder-name" * 8
    more = {"versions": {"sglang": "0.5.23", "client_python": long}, "environment": {"LONG_VARIABLE": "x" * 300}}
    run = benchmark_run.make(folder, "now", failing="eagle3-3-step", data=more)
    report.write(run, before)
    return run.folder / "report.html"


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser.Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


@pytest.mark.parametrize(("width", "height", "mobile"), [(1280, 900, False), (390, 844, True), (320, 568, True)])
def test_the_page_opens_without_an_error_asks_for_nothing_and_fits(tab, page, width, height, mobile):
    tab.open(page, width, height, mobile)
    assert tab.complaints() == []
    assert tab.requests() == [page.resolve().as_uri()]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate(OVERFLOW) == []
    assert tab.evaluate("document.querySelector('.verdict p').textContent").startswith("Enable with 2 steps")
    assert tab.evaluate("document.querySelectorAll('figure svg').length") == 5
    assert tab.evaluate("[...document.querySelectorAll('svg')].every(one => one.getBoundingClientRect().width > 250)")


def test_a_page_of_figures_that_could_not_be_measured_fits_as_well(tab, tmp_path):
    run = benchmark_run.make(tmp_path, "bare", rounds=1, data=NOT_MEASURED)
    report.write(run)
    for width, mobile in ((1280, False), (320, True)):
        tab.open(run.folder / "report.html", width, 900, mobile)
        assert tab.evaluate(OVERFLOW) == [] and tab.complaints() == []


def test_text_is_large_enough_on_a_phone(tab, page):
    tab.open(page, 390, 844, mobile=True)
    assert tab.evaluate(SMALLEST) >= 9


def test_a_row_of_the_table_is_a_card_of_its_own_on_a_phone_with_each_figure_named(tab, page):
    tab.open(page, 390, 844, mobile=True)
    shown = "getComputedStyle(document.querySelector('table.main td:nth-child(4)'), '::before').content"
    assert tab.evaluate(shown) == '"TTFT p50 / p99, ms"'
    tab.open(page, 1280, 900)
    assert tab.evaluate(shown) in ("none", "normal")


def test_it_prints(tab, page):
    tab.open(page, 1280, 900)
    printed = tab.pdf()
    assert printed.startswith(b"%PDF") and 2 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 12
