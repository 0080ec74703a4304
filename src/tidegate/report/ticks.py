"""Ticks of a logarithmic axis, where plotly's own are powers of ten and too few for a narrow range."""

from __future__ import annotations

import math
from collections.abc import Iterable

_FEW = 9
"""Up to so many different values each has its own tick."""


def log_ticks(values: Iterable[float | None]) -> list[float]:
    """Values at which a logarithmic axis over these has its ticks; those that are not positive have no place on it.

    A few different values are their own ticks; a narrow range has round numbers at equal steps, a wider one 1, 2 and
    5 in each decade, a wide one powers of ten.
    """
    numbers = sorted({value for value in values if value is not None and 0 < value < math.inf})
    if len(numbers) <= _FEW:
        return numbers
    low, high = numbers[0], numbers[-1]
    decades = math.log10(high / low)
    if decades < 0.7:
        return _linear(low, high)
    digits = (1, 2, 5) if decades < 3 else (1,)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [tick for power in exponents for digit in digits if low <= (tick := digit * 10.0**power) <= high]


def tick_text(value: float) -> str:
    """A tick in writing: separators up to ten thousand, then k, M, G, T, P, E."""
    if not 1e4 <= abs(value) < 1e21:
        return f"{value:,.6g}" if 1e-4 <= abs(value) < 1e4 or value == 0 else f"{value:.3g}"
    power = math.floor(math.log10(abs(value)) / 3)
    return f"{value / 1000.0**power:.4g}{'kMGTPE'[power - 1]}"


def _linear(low: float, high: float) -> list[float]:
    rough = (high - low) / 6
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [round(k * step, 12) for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
