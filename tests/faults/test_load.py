"""Many runs: what an executor adds to each, the driver's memory, and a page of them all."""

import json
import time

import browser
import pytest
import victims
from lab_lines import lines_of, page_of
from lab_runs import text_of

from tidegate.report import write_page

pytestmark = pytest.mark.torture

NUM_RUNS = 500


@pytest.mark.fault(lambda executor: f"{NUM_RUNS} tiny runs through {executor}")
@pytest.mark.parametrize("executor", ["processes", "ray"])
def test_every_run_ends_and_the_driver_does_not_grow(executor, tmp_path, report):
    text_of(tmp_path)
    process = victims.start(victims.many_runs, tmp_path, executor, NUM_RUNS, tmp_path / "answer.json")
    process.join()
    assert process.exitcode == 0
    answer = json.loads((tmp_path / "answer.json").read_text())
    assert answer["num_finished"] == NUM_RUNS
    assert answer["growth"] < 30 * 2**20
    report(
        tried=NUM_RUNS,
        outcome=f"{answer['overhead']:.2f} s for each beyond the run itself, start included; the driver grew by "
        f"{answer['growth'] / 2**20:.0f} MiB",
    )


@pytest.mark.fault(f"A page of {NUM_RUNS} runs")
@browser.needs_chromium
def test_a_page_of_many_runs_is_small_and_opens(tmp_path, report):
    lines = lines_of(text_of(tmp_path), "none,g1", num_seeds=NUM_RUNS // 2, steps=2)
    path = write_page(page_of(lines), tmp_path / "page")
    megabytes = path.stat().st_size / 1e6
    assert megabytes <= 8
    with browser.launch_chromium() as chromium:
        start = time.perf_counter()
        opened = browser.Opened(chromium, path)
        seconds = time.perf_counter() - start
        assert opened.complaints == []
    report(tried=1, outcome=f"{megabytes:.1f} MB, opened in Chromium in {seconds:.1f} s")
