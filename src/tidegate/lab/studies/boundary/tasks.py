r"""Classify points of the plane, shown as short sequences of tokens: three linear and five nonlinear boundaries.

A sequence shows one point several times; each token has its own noise and a position code. The label belongs to the
point; in the task `contrast` it belongs to the difference between the two halves of the sequence.

The mean of the tokens is a sufficient statistic: the point plus noise of standard deviation $\tau = 0.1/\sqrt 4$. Given
the mean, the point is normal around it, truncated to the square. The Bayes classifier chooses the side of the line with
more of this probability. Far from the edges of the square this is the side of the mean, with the error rate
$2\tau\ell/(\sqrt{2\pi} A)$ for a line of length $\ell$ in a square of area A.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

FloatArray: TypeAlias = NDArray[np.float64]
Labels: TypeAlias = NDArray[np.int64]
Draw: TypeAlias = Callable[[np.random.Generator, int], tuple[FloatArray, Labels]]

NUM_TOKENS = 4
WIDTH = 8
"""Width of a token: two coordinates, a one, four numbers that encode the position, and a 0."""
NOISE = 0.1

_DEVIATION = NOISE / math.sqrt(NUM_TOKENS)
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(100)
_REACH = 8.0
"""Limit of the integration, in standard deviations from the mean."""


def _uniform(rng: np.random.Generator, count: int) -> FloatArray:
    return rng.uniform(-1.5, 1.5, (count, 2))


@dataclass(frozen=True, kw_only=True, slots=True)
class HalfPlane:
    """Points of a square, labeled by the side of a line on which they lie."""

    normal: tuple[float, float]
    offset: float
    """Points whose product with the normal exceeds this are of class 1."""
    reach: float = 1.5
    """Half the side of the square."""

    def __call__(self, rng: np.random.Generator, count: int) -> tuple[FloatArray, Labels]:
        """Draw points (count, 2), uniform over the square, and their labels."""
        points = rng.uniform(-self.reach, self.reach, (count, 2))
        return points, (points @ self.normal > self.offset).astype(np.int64)


def _circle(rng: np.random.Generator, count: int) -> tuple[FloatArray, Labels]:
    points = _uniform(rng, count)
    return points, (np.linalg.norm(points, axis=1) < 1.2).astype(np.int64)


def _xor(rng: np.random.Generator, count: int) -> tuple[FloatArray, Labels]:
    points = _uniform(rng, count)
    return points, (points.prod(axis=1) > 0).astype(np.int64)


def _moons(rng: np.random.Generator, count: int) -> tuple[FloatArray, Labels]:
    labels, angle = rng.integers(0, 2, count), math.pi * rng.random(count)
    x = np.where(labels == 0, np.cos(angle), 1 - np.cos(angle))
    y = np.where(labels == 0, np.sin(angle), 0.5 - np.sin(angle))
    return np.stack([x - 0.5, 1.5 * (y - 0.25)], axis=1) + 0.08 * rng.standard_normal((count, 2)), labels


def _spirals(rng: np.random.Generator, count: int) -> tuple[FloatArray, Labels]:
    labels, along = rng.integers(0, 2, count), np.sqrt(rng.uniform(0.05, 1, count))
    angle = 1.5 * math.pi * along + math.pi * labels
    points = 1.5 * along[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1)
    return points + 0.05 * rng.standard_normal((count, 2)), labels


def _shells(rng: np.random.Generator, count: int) -> tuple[FloatArray, Labels]:
    """Draw from three rings around the origin, the middle one of the other class."""
    ring, angle = rng.choice(3, count, p=(0.25, 0.5, 0.25)), 2 * math.pi * rng.random(count)
    radius = 0.35 + 0.55 * ring + 0.08 * rng.standard_normal(count)
    return radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], axis=1), (ring == 1).astype(np.int64)


LINEAR = {
    "half-plane": HalfPlane(normal=(1.0, 0.5), offset=0.2),
    "steep": HalfPlane(normal=(0.2, -1.0), offset=-0.3),
    "contrast": HalfPlane(normal=(0.6, 0.8), offset=0.0, reach=1.0),
}
NONLINEAR: dict[str, Draw] = {
    "circle": _circle,
    "xor": _xor,
    "moons": _moons,
    "spirals": _spirals,
    "shells": _shells,
}
TASKS: dict[str, Draw] = {**LINEAR, **NONLINEAR}


def draw_examples(task: str, rng: np.random.Generator, count: int) -> tuple[FloatArray, Labels]:
    """Draw sequences (count, T, width) and labels (count,)."""
    points, labels = TASKS[task](rng, count)
    seen = tokens_of(points, task)
    seen[..., :2] += NOISE * rng.standard_normal((count, NUM_TOKENS, 2))
    return seen, labels


def tokens_of(points: FloatArray, task: str) -> FloatArray:
    """Return the sequences (..., T, width) that show points (..., 2), without noise."""
    shown = np.broadcast_to(points[..., None, :], (*points.shape[:-1], NUM_TOKENS, 2))
    shown = shown * _signs(task)[:, None]
    turns = 2 * math.pi * np.arange(NUM_TOKENS) / NUM_TOKENS
    codes = np.stack([np.ones(NUM_TOKENS), *(f(k * turns) for k in (1, 2) for f in (np.sin, np.cos))], axis=1)
    codes = np.broadcast_to(codes, (*points.shape[:-1], *codes.shape))
    return np.concatenate([shown, codes, np.zeros((*codes.shape[:-1], WIDTH - 7))], axis=-1)


def mean_point(sequences: FloatArray, task: str) -> FloatArray:
    """Return the mean over tokens (..., 2) of the noisy points that sequences (..., T, width) show."""
    return (sequences[..., :2] * _signs(task)[:, None]).mean(axis=-2)


def bayes_labels(task: str, sequences: FloatArray) -> Labels:
    """Return the more likely label of each sequence (count, T, width) of a task with a linear boundary."""
    plane = LINEAR[task]
    mean = mean_point(sequences, task)
    low, high = (np.clip(mean[:, :1] + sign * _REACH * _DEVIATION, -plane.reach, plane.reach) for sign in (-1.0, 1.0))
    # Integrate over the first coordinate; the second is in closed form, from the line to an edge.
    first = low + (high - low) * (_NODES + 1) / 2
    line = np.clip((plane.offset - plane.normal[0] * first) / plane.normal[1], -plane.reach, plane.reach)
    at_line, at_low, at_high = (ndtr((end - mean[:, 1:]) / _DEVIATION) for end in (line, -plane.reach, plane.reach))
    density = _WEIGHTS * np.exp(-(((first - mean[:, :1]) / _DEVIATION) ** 2) / 2)
    above, below = (density * (at_high - at_line)).sum(axis=1), (density * (at_line - at_low)).sum(axis=1)
    return ((above > below) == (plane.normal[1] > 0)).astype(np.int64)


def _signs(task: str) -> FloatArray:
    """Return the sign with which each token shows its point."""
    second_half = np.arange(NUM_TOKENS) >= NUM_TOKENS // 2
    return np.where(second_half & (task == "contrast"), -1.0, 1.0)
