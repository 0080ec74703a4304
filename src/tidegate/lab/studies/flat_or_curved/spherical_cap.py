r"""Layers whose weight chart approximates a cap of a sphere, by a gate that reads the output.

The attention weights of three keys have two degrees of freedom. With an elementwise gate,
$y = o \odot \sigma(o W + b)$, each feature is a product of two functions of the weights; enough of them, mixed by the
output projection, approximate any surface. A headwise gate, $y = o\,\sigma(w \cdot o)$, has the same factor for all
outputs of equal $w \cdot o$. These parallel flats stay parallel, so that it makes only generalized cylinders, a curve
times a flat. Without a gate the chart is a plane.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate.gates import Gates
from tidegate.geometry import Chart, gaussian_curvature, weight_chart
from tidegate.tensors.layer import AttentionArrays

FloatArray: TypeAlias = NDArray[np.float64]

PATCH = 0.3
"""Radius of the disc of weights around (1/3, 1/3, 1/3); the simplex ends at 0.41."""
_ELEMENTWISE = "output:output:b0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cap:
    """A patch of a weight chart, compared with a sphere."""

    name: str
    width: int
    """Features of the head."""
    num_points: int
    low: float
    """Smallest curvature on the patch."""
    high: float
    mean: float
    radius: float
    """Radius of the best-fitting sphere."""
    distance: float
    """Largest distance of the patch from that sphere, in radii."""


def patch_points(count: int, *, seed: int = 1) -> FloatArray:
    """Draw weights (count, 3), uniform over the disc."""
    rng = np.random.default_rng(seed)
    radius, angle = PATCH * np.sqrt(rng.random(count)), 2 * math.pi * rng.random(count)
    return 1 / 3 + np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1) @ simplex_frame().T


def cap_layer(width: int, *, half_angle: float = math.pi / 3, num_draws: int = 40, seed: int = 0) -> AttentionArrays:
    """Return a layer of one head whose weight chart approximates a cap of the unit sphere.

    Values and gate are random; the output projection is a least-squares fit on points that no measurement uses. The
    best of several draws is returned. `width` is that of the head, `half_angle` the angle between the pole and the rim.
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
            best, least = _layer(values, projection, _ELEMENTWISE, weight=gate[None], bias=bias[None]), error
    assert best is not None
    return best


def three_features() -> AttentionArrays:
    r"""Return a cap by hand: three keys with one value each, and the gate $y_k = w_k\,\sigma(1 - w_k)$."""
    return _layer(np.eye(3), np.eye(3), _ELEMENTWISE, weight=-np.eye(3)[None], bias=np.ones((1, 3)))


def cap_chart(layer: AttentionArrays) -> Chart:
    """Return the weight chart over three keys whose values are the rows of the layer's value map."""
    return weight_chart(layer, torch.eye(3, dtype=torch.float64))


def head_grain_chart(*, width: int = 32, seed: int = 0) -> Chart:
    """Return the weight chart of a head with a headwise gate that reads the output."""
    gate = 2 * np.random.default_rng(seed).standard_normal((1, width, 1))
    return cap_chart(_layer(*_random_maps(width, seed), "output:output:head", weight=gate))


def ungated_chart(*, width: int = 32, seed: int = 0) -> Chart:
    """Return the weight chart of a head without a gate."""
    return cap_chart(_layer(*_random_maps(width, seed), "none"))


def measure_cap(name: str, chart: Chart, width: int, *, num_points: int = 400) -> Cap:
    """Measure the curvature of the patch, and its distance from the best-fitting sphere."""
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


def _random_maps(width: int, seed: int) -> tuple[FloatArray, FloatArray]:
    rng = np.random.default_rng(seed + 1)
    return rng.standard_normal((3, width)), rng.standard_normal((width, 3))


def _layer(values: FloatArray, projection: FloatArray, gate: str, **parameters: FloatArray) -> AttentionArrays:
    zeros = np.zeros((1, *values.shape))
    return AttentionArrays(
        W_Q=zeros,
        W_K=zeros,
        W_V=values[None],
        W_O=projection[None],
        gates=Gates.parse(gate),
        gate_parameters={"output": parameters} if parameters else {},
    )


def simplex_frame() -> FloatArray:
    """Return an orthonormal basis (3, 2) of the directions in which weights can change."""
    return np.array([[1, 1], [-1, 1], [0, -2]]) / np.sqrt([2, 6])


def _sphere(weights: FloatArray, half_angle: float) -> FloatArray:
    """Map the disc onto the unit sphere by the exponential map at its pole."""
    at = (weights - 1 / 3) @ simplex_frame()
    distance = np.linalg.norm(at, axis=1, keepdims=True)
    angle = distance * half_angle / PATCH
    return np.concatenate([np.sin(angle) * at / distance, np.cos(angle)], axis=1)


def _fit_sphere(places: FloatArray) -> tuple[float, float]:
    """Fit a sphere to points (P, 3); return its radius and the largest distance from it in radii."""
    system = np.concatenate([2 * places, np.ones((len(places), 1))], axis=1)
    *center, rest = np.linalg.lstsq(system, (places**2).sum(axis=1))[0].tolist()
    radius = math.sqrt(rest + sum(part**2 for part in center))
    away = np.abs(np.linalg.norm(places - np.array(center), axis=1) - radius)
    return radius, float(away.max()) / radius
