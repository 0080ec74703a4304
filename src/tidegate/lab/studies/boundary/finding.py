"""What the trials say, in sentences."""

from __future__ import annotations

from typing import Any

import numpy as np

from tidegate.lab.studies.boundary.result import BoundaryResult
from tidegate.lab.studies.boundary.tasks import LINEAR, NONLINEAR
from tidegate.lab.studies.boundary.training import GATED, POINTWISE


def finding(result: BoundaryResult) -> str:
    """Say what holds, from the numbers."""
    linear = [_mean_accuracy(result, variant, LINEAR) for variant in result.options.variants]
    bent = (f"{variant} {_mean_accuracy(result, variant, NONLINEAR):.3f}" for variant in result.options.variants)
    related = (f"{each.among} r = {each.value:.2f} ({each.low:.2f} … {each.high:.2f})" for each in result.correlations)
    return (
        f"On linear boundaries all variants have mean accuracies between {min(linear):.3f} and {max(linear):.3f}. On "
        f"nonlinear ones: {', '.join(bent)}. What gates gain there, with 95 % intervals over seeds. "
        f"{_gains_in_words(result)} Correlation of accuracy with log curvature within nonlinear tasks: "
        f"{', '.join(related)}."
    )


def _gains_in_words(result: BoundaryResult) -> str:
    parts: list[str] = []
    for control in ("none", *POINTWISE):
        gains = [
            f"{each.variant} {each.value:+.3f} ({each.low:+.3f} … {each.high:+.3f})"
            for each in result.differences
            if each.control == control and each.kind == "nonlinear" and each.variant in GATED
        ]
        if gains:
            parts.append(f"Over {control}: {'; '.join(gains)}.")
    return " ".join(parts)


def _mean_accuracy(result: BoundaryResult, variant: str, tasks: dict[str, Any]) -> float:
    return float(np.mean([t.accuracy for t in result.trials if t.variant == variant and t.task in tasks]))
