"""The table of docs/reliability.md is made from what the harness reports."""

import os
import subprocess
import sys
from pathlib import Path

import faults

TABLE = "| fault | tried | what happened |\n|---|--:|---|\n| old | 1 | fine |"
PAGE = f"before\n{faults.BEGIN}\n{TABLE}\n{faults.END}\nafter\n"


def test_a_table_is_written_between_its_marks_and_read_again():
    outcomes = [faults.Outcome("a", 1, "bad"), faults.Outcome("b", 2000, "fine"), faults.Outcome("a", 3, "new")]
    written = faults.with_table(PAGE, outcomes)
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")
    assert "| a | 3 | new |\n| b | 2,000 | fine |" in written
    assert "bad" not in written
    assert set(faults.rows_of(written)) == {"a", "b"}


def test_a_fault_that_could_not_be_tried_keeps_its_row_if_it_has_one():
    untried = [faults.Outcome(fault, 0, "Skipped: no Chromium") for fault in ("old", "never tried")]
    assert faults.with_table(PAGE, untried) == PAGE


TESTS = """
import pytest

@pytest.mark.fault("skipped by a mark")
@pytest.mark.skip(reason="not here")
def test_a(): ...

@pytest.mark.fault("skipped by itself")
def test_b(): pytest.skip("not here")

@pytest.mark.fault("tried")
def test_c(report): report(tried=2, outcome="fine")
"""


def test_a_skipped_test_notes_its_fault_as_not_tried(tmp_path):
    """In a session of its own, with the conftest of this folder."""
    options = "def pytest_addoption(parser): parser.addoption('--outcomes')"
    (tmp_path / "conftest.py").write_text(f"{options}\n{Path(__file__).with_name('conftest.py').read_text()}")
    (tmp_path / "test_them.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = fault\n")
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--outcomes", "lines"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        check=True,
        capture_output=True,
    )
    noted = [(each.fault, each.tried) for each in faults.read(tmp_path / "lines")]
    assert noted == [("skipped by a mark", 0), ("skipped by itself", 0), ("tried", 2)]
