"""The table of docs/retrofit.md has the numbers of the record."""

import json
import re
import statistics
from pathlib import Path

DOCS = Path(__file__).parents[3] / "docs"
RECORD = json.loads((DOCS / "records" / "retrofit" / "gate-tuning.json").read_text(encoding="utf-8"))["result"]
ROWS = {row["remedy"]["name"]: row for row in RECORD["rows"]}
CHANGES = ("loss", "against_control", "sink", "strongest")


def table():
    """Return the cells of each row of the table, by remedy, without the word `control`."""
    lines = (DOCS / "retrofit.md").read_text(encoding="utf-8").splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("| training |"))
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines[start + 2 : start + 4 + len(ROWS)] if line]
    return {row[0].strip().removesuffix(" (control)"): [cell.strip() for cell in row] for row in rows}


def number(value, digits):
    """Format with a sign unless the value rounds to zero, and with a typographic minus."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "−")


def change(measured):
    if measured is None:
        return "—"
    value, low, high = (number(measured[name], 4) for name in ("value", "low", "high"))
    return f"{value} ({low} … {high})"


def mean(measured, name):
    return statistics.fmean(each[name] for each in measured)


def test_the_table_is_that_of_the_record():
    loss, sink, strongest = (mean(RECORD["before"], name) for name in ("loss", "sink", "strongest"))
    expected = {
        "none (before)": [f"{loss:.4f}", "—", "—", f"{sink:.4f} (absolute)", f"{strongest:.4f} (absolute)", "—"]
    }
    for remedy, row in ROWS.items():
        movement = "—" if row["remedy"]["gate_rate"] is None else f"{mean(row['measured'], 'movement'):.3f}"
        expected[remedy] = [f"{mean(row['measured'], 'loss'):.4f}", *(change(row[name]) for name in CHANGES), movement]
    assert {remedy: cells[1:] for remedy, cells in table().items()} == expected
