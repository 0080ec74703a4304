"""What the study of boundaries leaves, as plain data that go through JSON and back."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.lab.studies.boundary.correlation import Correlation
from tidegate.lab.studies.boundary.training import BoundaryOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One variant on one task under one seed."""

    variant: str
    task: str
    seed: int
    learning_rate: float
    accuracy: float
    curvature: float
    """Median of |K| over points, relative to the squared spread of the surface."""
    positive: float
    """Share of points with positive curvature."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Accuracy of a variant less another's, mean over a kind of tasks, with a 95 % interval over seeds."""

    variant: str
    control: str
    kind: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryResult:
    """All trials and what they say together."""

    options: BoundaryOptions
    num_parameters: dict[str, int]
    trials: tuple[Trial, ...]
    differences: tuple[Difference, ...]
    correlations: tuple[Correlation, ...]
