"""The faults that tests/faults tries: one row each in docs/reliability.md, made from what the tests report.

`make torture` runs them at full length with `--outcomes FILE`, which collects a line for each, and then this script,
which writes them into the table of the page: `python tests/support/faults.py FILE`. A fault that could not be tried,
for lack of Chromium or of the right to mount, keeps its row.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one fault, in words with numbers."""

    fault: str
    tried: int
    """Number of attempts; 0 if its test was skipped."""
    outcome: str


def fault_of(test):
    """The fault that a test is marked with, by its name or by a function of the test's parameters."""
    (name,) = test.get_closest_marker("fault").args
    parameters = test.callspec.params if hasattr(test, "callspec") else {}
    return name if isinstance(name, str) else name(**parameters)


def rows_of(page):
    """The rows of a page's table, by fault."""
    rows = page.split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    return {row.split("|")[1].strip(): row for row in rows}


def with_table(page, outcomes):
    """Return the page with these outcomes as its table, sorted by fault.

    The last outcome of a fault counts; a fault that was not tried keeps its row, if it has one.
    """
    before, rest = page.split(BEGIN)
    old, rows = rows_of(page), {}
    for each in outcomes:
        row = f"| {each.fault} | {each.tried:,} | {each.outcome} |" if each.tried else old.get(each.fault)
        rows |= {} if row is None else {each.fault: row}
    table = ["| fault | tried | what happened |", "|---|--:|---|", *(row for _, row in sorted(rows.items()))]
    return "\n".join([before + BEGIN, *table, END + rest.split(END)[1]])


def note(path, outcome):
    """Add an outcome to a file of lines."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def read(path):
    """The outcomes of a file of lines."""
    return [Outcome(**json.loads(line)) for line in Path(path).read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), read(sys.argv[1])), encoding="utf-8")
