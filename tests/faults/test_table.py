"""The table of docs/reliability.md is made from what the harness reports."""

import faults


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
