"""What works with each causal model type of transformers: makes docs/models-supported.md.

`make models` runs this script over all types, which takes some minutes, and writes the table into the page. Run it
again with another transformers: types that are new are built from the generic sizes of model_types.py, and those that
cannot be are named with the error.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import gated_types
import model_types
import other_types
import torch
import transformers
from observed_types import examine

PAGE = Path(__file__).parents[2] / "docs" / "models-supported.md"
BEGIN, END = "<!-- models: begin -->", "<!-- models: end -->"
GATES = ("g1", "bma")
COLUMNS = (*GATES, "observe")
BEFORE = {"g1": 134, "bma": 116, "observe": 145, "of": 175}
"""How many types worked, with tiny models like these, when both went by the attention interface or kernel alone."""


@dataclass(frozen=True)
class Row:
    """What came of one type."""

    model_type: str
    built: bool
    attends: bool
    refusals: dict[str, str]
    """By column, why it does not work; columns that work are not in it."""
    note: str = ""


def row_of(model_type):
    """Try all columns on a tiny model."""
    if model_type in model_types.NOT_BUILT:
        return Row(model_type, built=False, attends=True, refusals={}, note=model_types.NOT_BUILT[model_type])
    attends = model_type not in model_types.NO_ATTENTION
    try:
        model_types.build(model_type)
    except Exception as error:
        return Row(model_type, built=False, attends=attends, refusals={}, note=f"the tiny model fails: {error}")
    if not attends:
        return Row(model_type, built=True, attends=False, refusals={}, note="no softmax attention")
    refusals, left_alone = {}, 0
    for gate in GATES:
        try:
            left_alone = max(left_alone, len(gated_types.check_gates(model_type, gate).left_alone))
        except ValueError as error:
            refusals[gate] = reason_of(error)
    if why := observed_reason(model_type):
        refusals["observe"] = why
    note = f"{left_alone} attention modules left alone" if left_alone else ""
    return Row(model_type, built=True, attends=True, refusals=refusals, note=note)


def reason_of(error):
    """The part of a refusal that differs from model to model."""
    text = " ".join(str(error).split()).split("cannot take gates: ")[-1]
    return text.split(", where ")[-1].removesuffix(".")


def observed_reason(model_type):
    """Why `observe` does not see this type; empty if it does."""
    return _without_names(examine(model_type).why)


def _without_names(why):
    """Say the same of all models that show no attention call: the error names each."""
    return "no attention call is seen" if why.startswith("No attention call of ") else why


def count_others(kind):
    """How many types of a kind are built here, and how many take each gate."""
    found = {name: [other_types.check_gates(kind, name, gate) for gate in GATES] for name in other_types.KINDS[kind]}
    built = [each for each in found.values() if each[0] is not None]
    return len(found), len(built), *(sum(each[column] for each in built) for column in range(len(GATES)))


def page_of(page, rows, others):
    """The page with these rows, and these counts of other kinds, in place of its tables."""
    head, rest = page.split(BEGIN)
    attending = [row for row in rows if row.built and row.attends]
    reasons = list(dict.fromkeys(why for row in rows for why in row.refusals.values()))
    lines = [
        f"Made with transformers {transformers.__version__}, PyTorch {torch.__version__.split('+')[0]} and Python "
        f"{sys.version_info.major}.{sys.version_info.minor}: {len(rows)} types, of which "
        f"{sum(row.built for row in rows)} are built here and {len(attending)} of those have softmax attention.",
        "",
        f"| of {len(attending)} | {' | '.join(COLUMNS)} |",
        f"|---|{'--:|' * len(COLUMNS)}",
        f"| before | {' | '.join(_share(BEFORE[column], BEFORE['of']) for column in COLUMNS)} |",
        f"| now | {' | '.join(_share(_working(attending, column), len(attending)) for column in COLUMNS)} |",
        "",
        f"| model type | {' | '.join(COLUMNS)} | |",
        f"|---|{':-:|' * len(COLUMNS)}---|",
        *(_line(row, reasons) for row in rows),
        "",
        "Why not:",
        "",
        *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)),
        "",
        "Other kinds of models, as far as generic sizes build one: the bits stay, and every gate has a gradient.",
        "",
        f"| kind | types | built | {' | '.join(GATES)} |",
        f"|---|--:|--:|{'--:|' * len(GATES)}",
        *(f"| {kind} | {' | '.join(map(str, counts))} |" for kind, counts in others.items()),
    ]
    return "\n".join([head + BEGIN, *lines, END + rest.split(END)[1]])


def _share(count, total):
    return f"{count} ({count / total:.0%})"


def _working(rows, column):
    return sum(column not in row.refusals for row in rows)


def _line(row, reasons):
    if not (row.built and row.attends):
        return f"| `{row.model_type}` |{' — |' * len(COLUMNS)} {row.note} |"
    cells = (
        f"no ({reasons.index(row.refusals[column]) + 1})" if column in row.refusals else "yes" for column in COLUMNS
    )
    return f"| `{row.model_type}` | {' | '.join(cells)} | {row.note} |"


def main(names):
    transformers.logging.set_verbosity_error()
    rows = []
    for model_type in names or model_types.model_types():
        rows.append(row := row_of(model_type))
        print(row.model_type, row.note, row.refusals or "", flush=True)
    if not names:
        others = {kind: count_others(kind) for kind in other_types.KINDS}
        PAGE.write_text(page_of(PAGE.read_text(encoding="utf-8"), rows, others), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
