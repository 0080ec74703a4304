r"""Layers whose weight chart is a cap of a sphere, or nearly: what a gate that reads the output can do.

Three keys leave two weights to move. One number for each feature, $y = o \odot \sigma(o W + b)$, makes of every feature
a product of two functions of the weights; enough of them, mixed by the output projection, follow any surface. A gate of
one number a head, $y = o\,\sigma(w \cdot o)$, has one factor for all outputs of equal $w \cdot o$: these parallel flats
stay parallel, so that it makes generalised cylinders alone, a curve times a flat. No gate at all makes planes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.gate import GatePath
from tidegate.gates import Gates
from tidegate.geometry import Chart, gaussian_curvature, weight_chart
from tidegate.tensors.layer import AttentionArrays

FloatArray: TypeAlias = NDArray[np.float64]

PATCH = 0.3
"""Radius of the disc of weights about (1/3, 1/3, 1/3); the simplex ends at 0.41."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cap:
    """A patch of a weight chart, held against a sphere."""

    name: str
    width: int
    """Features of the head."""
    num_points: int
    low: float
    """Least curvature on the patch."""
    high: float
    mean: float
    radius: float
    """Of the sphere that fits the patch best."""
    distance: float
    """How far the patch leaves that sphere at most, in radii."""


def patch_points(count: int, *, seed: int = 1) -> FloatArray:
    """Weights (count, 3), evenly distributed over the disc."""
    rng = np.random.default_rng(seed)
    radius, angle = PATCH * np.sqrt(rng.random(count)), 2 * math.pi * rng.random(count)
    return 1 / 3 + np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1) @ simplex_frame().T


def cap_layer(width: int, *, half_angle: float = math.pi / 3, num_draws: int = 40, seed: int = 0) -> AttentionArrays:
    """Return a layer of one head whose weight chart is as near to a cap of the unit sphere as its features allow.

    Values and gate are drawn at random and the output projection is fitted by least squares, on points that no
    measurement uses; the best of several draws is kept.

    Args:
        width: Features of the head.
        half_angle: How far the cap reaches from its pole.
        num_draws: Of values and gates.
        seed: Of the draws.
    """
    weights = patch_points(1000, seed=seed)
    target = _sphere(weights, half_angle)
    rng = np.random.default_rng(seed)
    best, least = None, math.inf
    for _ in range(num_draws):
        values, bias = rng.standard_normal((3, width)), 2 * rng.standard_normal(width)
        gate = 2 * rng.standard_normal((width, width)) / math.sqrt(width)
        outputs = weights @ values
        features = outputs / (1 + np.exp(-(outputs @ gate + bias)))
        projection = np.asarray(np.linalg.lstsq(features, target, rcond=1e-13)[0], dtype=np.float64)
        error = float(np.abs(features @ projection - target).max())
        if error < least:
            best, least = _layer(values, projection, gate, bias), error
    assert best is not None
    return best


def three_features() -> AttentionArrays:
    r"""A cap by hand: three keys, one value for each, and the gate $y_k = w_k\,\sigma(1 - w_k)$."""
    return _layer(np.eye(3), np.eye(3), -np.eye(3), np.ones(3))


def cap_chart(layer: AttentionArrays) -> Chart:
    """Return the layer's weight chart over three keys, whose values are the rows of its value map."""
    return weight_chart(layer, torch.eye(3, dtype=torch.float64))


def head_grain_chart(*, width: int = 32, seed: int = 0) -> Chart:
    """Return the weight chart of a head with one gate for all features, which reads the output as the cap's does."""
    gate = 2 * np.random.default_rng(seed).standard_normal((1, width, 1))
    return cap_chart(_random_layer(width, seed, gates="output:output:head", parameters={"output": {"weight": gate}}))


def ungated_chart(*, width: int = 32, seed: int = 0) -> Chart:
    """Return the weight chart of a head without a gate."""
    return cap_chart(_random_layer(width, seed, gates="none", parameters={}))


def measure_cap(name: str, chart: Chart, width: int, *, num_points: int = 400) -> Cap:
    """Measure curvature over the patch, and the distance from the sphere that fits it best."""
    points = torch.from_numpy(patch_points(num_points)[:, :2])
    curvature = gaussian_curvature(chart, points)
    places = torch.stack([chart(point) for point in points]).numpy()
    radius, distance = _fit_sphere(places)
    return Cap(
        name=name,
        width=width,
        num_points=num_points,
        low=float(curvature.min()),
        high=float(curvature.max()),
        mean=float(curvature.mean()),
        radius=radius,
        distance=distance,
    )


def _random_layer(
    width: int, seed: int, *, gates: str, parameters: Mapping[GatePath, Mapping[str, FloatArray]]
) -> AttentionArrays:
    rng = np.random.default_rng(seed + 1)
    nothing = np.zeros((1, 3, width))
    return AttentionArrays(
        W_Q=nothing,
        W_K=nothing,
        W_V=rng.standard_normal((1, 3, width)),
        W_O=rng.standard_normal((1, width, 3)),
        gates=Gates.parse(gates),
        gate_parameters=parameters,
    )


def _layer(values: FloatArray, projection: FloatArray, gate: FloatArray, bias: FloatArray) -> AttentionArrays:
    nothing = np.zeros((1, *values.shape))
    return AttentionArrays(
        W_Q=nothing,
        W_K=nothing,
        W_V=values[None],
        W_O=projection[None],
        gates=Gates.parse("output:output:b0"),
        gate_parameters={"output": {"weight": gate[None], "bias": bias[None]}},
    )


def simplex_frame() -> FloatArray:
    """An orthonormal basis (3, 2) of the directions in which weights move."""
    return np.array([[1, 1], [-1, 1], [0, -2]]) / np.sqrt([2, 6])


def _sphere(weights: FloatArray, half_angle: float) -> FloatArray:
    """Map the disc onto the unit sphere by the exponential map about its pole."""
    at = (weights - 1 / 3) @ simplex_frame()
    distance = np.linalg.norm(at, axis=1, keepdims=True)
    angle = distance * half_angle / PATCH
    return np.concatenate([np.sin(angle) * at / distance, np.cos(angle)], axis=1)


def _fit_sphere(places: FloatArray) -> tuple[float, float]:
    """Fit a sphere to points (P, 3): its radius, and the largest distance from it in radii."""
    system = np.concatenate([2 * places, np.ones((len(places), 1))], axis=1)
    *centre, rest = np.linalg.lstsq(system, (places**2).sum(axis=1))[0].tolist()
    radius = math.sqrt(rest + sum(part**2 for part in centre))
    away = np.abs(np.linalg.norm(places - np.array(centre), axis=1) - radius)
    return radius, float(away.max()) / radius
