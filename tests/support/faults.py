"""The faults that tests/faults tries: one row each in docs/reliability.md, made from what the tests report.

`make torture` runs them at full length with `--outcomes FILE`, which gathers a line for each, and then this script,
which writes them into the table of the page: `python tests/support/faults.py FILE`.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"


@dataclass(frozen=True)
class Outcome:
    """What came of one fault: how often it was tried, and what happened, in words with figures."""

    fault: str
    tried: int
    outcome: str


def table(outcomes):
    """The rows of the page, in the order of the faults' names; of a fault that was tried twice the last."""
    last = {outcome.fault: outcome for outcome in outcomes}
    rows = [f"| {row.fault} | {row.tried:,} | {row.outcome} |" for _, row in sorted(last.items())]
    return "\n".join(["| fault | tried | what happened |", "|---|--:|---|", *rows])


def faults_of(page):
    """The faults that the table of a page names."""
    rows = _between(page).strip().splitlines()[2:]
    return {row.split("|")[1].strip() for row in rows}


def with_table(page, outcomes):
    """The page with these outcomes in place of its table."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{table(outcomes)}\n{END}{rest.split(END)[1]}"


def note(path, outcome):
    """Add an outcome to a file of lines."""
    with Path(path).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def read(path):
    """The outcomes of a file of lines."""
    return [Outcome(**json.loads(line)) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def _between(page):
    return page.split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), read(sys.argv[1])), encoding="utf-8")
