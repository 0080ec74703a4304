"""Means over seeds with their intervals, in words and as panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from tidegate.lab.judging import t_interval
from tidegate.report.page import Estimate, Intervals


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedMean:
    """A mean over seeds with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> SeedMean:
        """Return the mean of one value per seed, of which there are at least two."""
        low, high = t_interval(values)
        return cls(value=fmean(values), low=low, high=high)

    def excludes(self, point: float) -> bool:
        """Return whether the interval lies on one side of a point."""
        return self.low > point or self.high < point


def format_interval(found: Any, form: str) -> str:
    """Format the `value`, `low` and `high` of an estimate, as in 1.2 (1.0 … 1.4)."""
    return f"{found.value:{form}} ({found.low:{form}} … {found.high:{form}})"


def interval_panel(title: str, x_label: str, found: Mapping[str, Any], *, form: str) -> Intervals:
    """Return a panel of estimates by label, each with `value`, `low` and `high`; `form` formats values in its words."""
    return Intervals(
        title=title,
        alternative="; ".join(f"{label} {each.value:{form}}" for label, each in found.items()),
        x_label=x_label,
        items=tuple(
            Estimate(label=label, value=each.value, low=each.low, high=each.high) for label, each in found.items()
        ),
    )
