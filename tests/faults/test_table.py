"""The page of reliability has a row for each fault that the harness reports."""

import ast
from pathlib import Path

import faults

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "reliability.md"


def reported_faults(file):
    """The names that a test file reports, read from its calls of `report`."""
    calls = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    return {
        call.args[0].value
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "report" and isinstance(call.args[0], ast.Constant)
    }


def test_a_table_is_written_between_its_marks_and_read_again():
    page = f"before\n{faults.BEGIN}\nold\n{faults.END}\nafter\n"
    outcomes = [faults.Outcome("a", 1, "old"), faults.Outcome("b", 2000, "fine"), faults.Outcome("a", 3, "new")]
    written = faults.with_table(page, outcomes)
    assert written.startswith("before\n")
    assert written.endswith("\nafter\n")
    assert "| a | 3 | new |\n| b | 2,000 | fine |" in written
    assert "old" not in written
    assert faults.faults_of(written) == {"a", "b"}


def test_outcomes_go_through_a_file(tmp_path):
    outcomes = [faults.Outcome("a", 1, "fine"), faults.Outcome("b", 2, "fine")]
    for outcome in outcomes:
        faults.note(tmp_path / "lines", outcome)
    assert faults.read(tmp_path / "lines") == outcomes


def test_the_page_names_every_fault_that_is_tried():
    tried = set().union(*map(reported_faults, HERE.glob("test_*.py")))
    assert faults.faults_of(PAGE.read_text()) == tried
