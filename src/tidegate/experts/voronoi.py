"""Measure the distance of fitted from true experts by losses over Voronoi cells.

A fitted expert belongs to the true one with the nearest gate. Experts without gates have no cells; the assignment with
the smallest loss is used, which favors them. The order of fitted experts never matters.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from tidegate._validation import InputError, require_choice
from tidegate.experts.layers import Floats

LossKind: TypeAlias = Literal["vector_mass", "scalar_mass", "raw"]
_LARGEST_SEARCH = 100_000


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Atoms:
    """Experts as atoms with masses, and locations if they have gates."""

    masses: Floats
    """(k, d)"""
    locations: Floats | None = None
    """(k, p): parameters of the gates; None without gates."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LossParts:
    """A loss and its parts."""

    merged: float
    """Error of the masses by the kind of loss; a cell without a fitted atom costs its whole mass."""
    covered: float
    """Mass times distance of gates, over cells with one fitted atom."""
    over: float
    """Mass times squared distance of gates, over cells with several fitted atoms."""
    assignment: Any
    """(k,): index of the true atom of each fitted one."""
    merged_masses: Floats
    """(k*, d): sum of the fitted masses of each cell."""

    @property
    def total(self) -> float:
        """Return the sum of all parts."""
        return self.merged + self.covered + self.over


def voronoi_loss(fitted: Atoms, truth: Atoms, *, kind: LossKind = "vector_mass") -> LossParts:
    """Return the distance of fitted from true atoms, with its parts.

    Args:
        fitted: At least as many atoms as `truth`.
        truth: With locations if `fitted` has them.
        kind: `vector_mass` compares the sum of a cell's vectors with the true vector, `scalar_mass` the sum of their
            norms with the true norm, `raw` each vector with the true one. With surplus experts the kind determines
            which errors can vanish.

    Raises:
        InputError: There are fewer fitted than true atoms, too many without locations, or only one has locations.
    """
    require_choice("kind", kind, get_args(LossKind))
    k, k_star = len(fitted.masses), len(truth.masses)
    if k < k_star:
        raise InputError("fitted", expected=f"at least as many atoms as truth, {k_star}", got=k)
    if (fitted.locations is None) != (truth.locations is None):
        raise InputError("fitted", expected="atoms with locations if and only if truth has them")
    if fitted.locations is None or truth.locations is None:
        return _best_assignment(fitted, truth, kind)
    distances = np.linalg.norm(fitted.locations[:, None] - truth.locations[None], axis=-1)
    assignment = np.argmin(distances, axis=1)
    spent = np.linalg.norm(fitted.masses, axis=1) * distances[np.arange(k), assignment]
    squared = spent * distances[np.arange(k), assignment]
    alone = np.bincount(assignment, minlength=k_star)[assignment] == 1
    return LossParts(
        merged=_mass_error(fitted.masses, truth.masses, assignment, kind),
        covered=float(np.sum(spent[alone])),
        over=float(np.sum(squared[~alone])),
        assignment=assignment,
        merged_masses=_merge(fitted.masses, assignment, k_star),
    )


def _best_assignment(fitted: Atoms, truth: Atoms, kind: LossKind) -> LossParts:
    k, k_star = len(fitted.masses), len(truth.masses)
    if k_star**k > _LARGEST_SEARCH:
        expected = f"atoms without locations that can be assigned in at most {_LARGEST_SEARCH:,} ways"
        raise InputError("fitted", expected=expected, got=k_star**k)
    ways = [np.array(way) for way in product(range(k_star), repeat=k)]
    losses = [_mass_error(fitted.masses, truth.masses, way, kind) for way in ways]
    best = int(np.argmin(losses))
    merged = _merge(fitted.masses, ways[best], k_star)
    return LossParts(merged=losses[best], covered=0.0, over=0.0, assignment=ways[best], merged_masses=merged)


def _mass_error(fitted: Floats, truth: Floats, assignment: Any, kind: LossKind) -> float:
    if kind == "vector_mass":
        return float(np.sum(np.linalg.norm(_merge(fitted, assignment, len(truth)) - truth, axis=1)))
    lengths, true_lengths = np.linalg.norm(fitted, axis=1), np.linalg.norm(truth, axis=1)
    if kind == "scalar_mass":
        return float(np.sum(np.abs(_merge(lengths[:, None], assignment, len(truth))[:, 0] - true_lengths)))
    empty = np.bincount(assignment, minlength=len(truth)) == 0
    return float(np.sum(np.linalg.norm(fitted - truth[assignment], axis=1)) + np.sum(true_lengths[empty]))


def _merge(masses: Floats, assignment: Any, k_star: int) -> Floats:
    merged = np.zeros((k_star, masses.shape[1]))
    np.add.at(merged, assignment, masses)
    return merged
