"""The figures of every variant under every seed: checked, described, and sorted by who is left to be judged."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from tidegate.lab.judging.verdicts import Comparison, VariantResult
from tidegate.report.page import VerdictWord

Rows: TypeAlias = Mapping[str, tuple[float | None, ...]]
"""For each variant one figure for each seed; None where the run diverged."""

MIN_BLOCKS = 3
"""Seeds below which nobody is judged."""


def mean_and_sd(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard deviation (n - 1 in the denominator) of at least one number; of one, the deviation is None."""
    if not len(values):
        raise ValueError("values is empty; a mean needs at least one number.")
    numbers = np.asarray(values, dtype=np.float64)
    return float(numbers.mean()), float(numbers.std(ddof=1)) if len(numbers) > 1 else None


def describe(rows: Rows, *, control: str, margin: float, identical: Collection[str]) -> Comparison:
    """A comparison in which the control, the identical and the diverged are called that, and the rest are undecided.

    margin    : as a share of the control's mean
    identical : variants known to be the control under another name; one whose figures are the control's in every run,
                while they vary from run to run, is found without being named
    """
    _check(rows, control, identical)
    if not 0 <= margin < math.inf:
        raise ValueError(f"margin must be a share of the control's mean, 0 or more; got {margin!r}.")
    control_mean = _complete_mean(rows[control])
    verdicts = _verdicts(rows, control, identical)
    return Comparison(
        control=control,
        num_blocks=len(rows[control]),
        margin=None if control_mean is None else margin * abs(control_mean),
        relative_margin=margin,
        variants=tuple(_described(name, row, verdicts[name], control_mean) for name, row in rows.items()),
        warnings=tuple(
            f"{name} is said to be identical to {control}, yet their figures differ: runs are not reproducible here"
            for name in rows
            if name in identical and rows[name] != rows[control]
        ),
        refusal=_refusal(rows[control], control),
    )


def _refusal(row: tuple[float | None, ...], control: str) -> str:
    if None in row:
        return f"the control, {control}, diverged in {row.count(None)} of {len(row)} runs"
    if len(row) < MIN_BLOCKS:
        return f"a verdict needs at least {MIN_BLOCKS} seeds, and there are {len(row)}"
    return ""


def _verdicts(rows: Rows, control: str, identical: Collection[str]) -> dict[str, VerdictWord]:
    # A control that never varies (an accuracy of 1 under every seed) may well be equalled by something else.
    telling = len(set(rows[control])) > 1

    def verdict(name: str) -> VerdictWord:
        if name == control:
            return "control"
        if name in identical or (telling and rows[name] == rows[control]):
            return "identical"
        return "diverged" if None in rows[name] else "undecided"

    return {name: verdict(name) for name in rows}


def _described(
    name: str, row: tuple[float | None, ...], verdict: VerdictWord, control_mean: float | None
) -> VariantResult:
    ended = [value for value in row if value is not None]
    mean, sd = mean_and_sd(ended) if ended else (None, None)
    complete = _complete_mean(row)
    difference = None
    if control_mean is not None and complete is not None and verdict != "control":
        difference = complete - control_mean
    return VariantResult(
        name=name,
        mean=mean,
        sd=sd,
        difference=difference,
        relative_difference=difference / abs(control_mean) if control_mean and difference is not None else None,
        verdict=verdict,
        num_diverged=row.count(None),
    )


def _complete_mean(row: tuple[float | None, ...]) -> float | None:
    ended = [value for value in row if value is not None]
    return mean_and_sd(ended)[0] if len(ended) == len(row) else None


def _check(rows: Rows, control: str, identical: Collection[str]) -> None:
    if control not in rows:
        raise ValueError(f"control must be one of the variants {list(rows)}; got {control!r}.")
    if len(rows) < 2:
        raise ValueError(f"losses has the control {control!r} alone; give at least one variant to compare with it.")
    if isinstance(identical, str) or not set(identical) <= set(rows) - {control}:
        raise ValueError(f"identical must name variants other than the control, of {list(rows)}; got {identical!r}.")
    lengths = {name: len(row) for name, row in rows.items()}
    if len(set(lengths.values())) > 1 or not lengths[control]:
        raise ValueError(
            f"losses must have one figure for each seed in every variant, None where a run diverged; got {lengths}."
        )
    for name, row in rows.items():
        for value in row:
            if value is not None and not math.isfinite(value):
                raise ValueError(f"losses of {name!r} must be finite, or None where the run diverged; got {value!r}.")
