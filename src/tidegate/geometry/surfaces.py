"""Surfaces with a closed-form curvature, as references for tests and plots, for PyTorch, JAX and NumPy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from tidegate.geometry.differentiation import Function
from tidegate.tensors.namespace import Array, Namespace, namespace_of

_Formula: TypeAlias = Callable[[Namespace, Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Surface:
    """A chart of two coordinates, with the Gaussian curvature of its image."""

    name: str
    coordinates: Callable[[Namespace, Any, Any], list[Any]]
    """Takes an array library and the two coordinates, and returns the outputs."""
    formula: _Formula
    """Takes the same, and returns the curvature."""
    low: tuple[float, float]
    """The lower corner of a rectangle of coordinates on which the chart is smooth and has full rank."""
    high: tuple[float, float]

    def __call__(self, x: Array) -> Array:
        """Return the point of the surface at coordinates (2,)."""
        xp = namespace_of(x)
        return xp.stack(self.coordinates(xp, x[0], x[1]))

    def curvature(self, x: Array) -> Array:
        """Return the Gaussian curvature at coordinates (..., 2)."""
        xp = namespace_of(x)
        return self.formula(xp, x[..., 0], x[..., 1])


def plane() -> Surface:
    """A plane in three dimensions, under a chart that is not affine; K = 0."""
    return Surface(
        name="plane",
        coordinates=lambda xp, a, b: [xp.exp(a), a + b**3, 2 * xp.exp(a) - a - b**3],
        formula=_constant(0.0),
        low=(-1, 0.2),
        high=(1, 1),
    )


def cylinder(radius: float = 1.5) -> Surface:
    """A round cylinder; K = 0."""
    return Surface(
        name="cylinder",
        coordinates=lambda xp, a, b: [radius * xp.cos(a), radius * xp.sin(a), b],
        formula=_constant(0.0),
        low=(0, -1),
        high=(6, 1),
    )


def cone(slope: float = 0.7) -> Surface:
    """A round cone without its tip; K = 0."""
    return Surface(
        name="cone",
        coordinates=lambda xp, a, b: [b * xp.cos(a), b * xp.sin(a), slope * b],
        formula=_constant(0.0),
        low=(0, 0.3),
        high=(6, 2),
    )


def sphere(radius: float = 2.0) -> Surface:
    """A sphere by latitude and longitude, without its poles; K = 1 / radius²."""
    return Surface(
        name="sphere",
        coordinates=lambda xp, a, b: [
            radius * xp.cos(a) * xp.cos(b),
            radius * xp.cos(a) * xp.sin(b),
            radius * xp.sin(a),
        ],
        formula=_constant(radius**-2),
        low=(-1.2, 0),
        high=(1.2, 6),
    )


def torus(major: float = 2.0, minor: float = 0.6) -> Surface:
    """A torus of revolution; K = cos a / (minor (major + minor cos a)), positive outside and negative inside."""
    return Surface(
        name="torus",
        coordinates=lambda xp, a, b: [
            (major + minor * xp.cos(a)) * xp.cos(b),
            (major + minor * xp.cos(a)) * xp.sin(b),
            minor * xp.sin(a),
        ],
        formula=lambda xp, a, _: xp.cos(a) / (minor * (major + minor * xp.cos(a))),
        low=(0, 0),
        high=(6, 6),
    )


def paraboloid(steepness: float = 0.8) -> Surface:
    """The bowl z = c (a² + b²); K = 4c² / (1 + 4c² (a² + b²))²."""
    return Surface(
        name="paraboloid",
        coordinates=lambda _, a, b: [a, b, steepness * (a * a + b * b)],
        formula=lambda _, a, b: 4 * steepness**2 / (1 + 4 * steepness**2 * (a * a + b * b)) ** 2,
        low=(-1, -1),
        high=(1, 1),
    )


def saddle(steepness: float = 1.0) -> Surface:
    """The surface z = c a b; K = −c² / (1 + c² (a² + b²))²."""
    return Surface(
        name="saddle",
        coordinates=lambda _, a, b: [a, b, steepness * a * b],
        formula=lambda _, a, b: -(steepness**2) / (1 + steepness**2 * (a * a + b * b)) ** 2,
        low=(-1, -1),
        high=(1, 1),
    )


def catenoid(waist: float = 1.3) -> Surface:
    """A minimal surface; K = −1 / (waist² cosh⁴(b / waist))."""
    return Surface(
        name="catenoid",
        coordinates=lambda xp, a, b: [
            waist * xp.cosh(b / waist) * xp.cos(a),
            waist * xp.cosh(b / waist) * xp.sin(a),
            b,
        ],
        formula=lambda xp, _, b: -1 / (waist**2 * xp.cosh(b / waist) ** 4),
        low=(0, -1),
        high=(6, 1),
    )


def pseudosphere() -> Surface:
    """A tractrix rotated about its axis, without its edge; K = −1."""
    return Surface(
        name="pseudosphere",
        coordinates=lambda xp, a, b: [xp.cos(a) / xp.cosh(b), xp.sin(a) / xp.cosh(b), b - xp.tanh(b)],
        formula=_constant(-1.0),
        low=(0, 0.5),
        high=(6, 2),
    )


def clifford_torus(first: float = 1.0, second: float = 0.5) -> Surface:
    """The product of two circles in four dimensions; K = 0, though its second fundamental form is not."""
    return Surface(
        name="clifford torus",
        coordinates=lambda xp, a, b: [first * xp.cos(a), first * xp.sin(a), second * xp.cos(b), second * xp.sin(b)],
        formula=_constant(0.0),
        low=(0, 0),
        high=(6, 6),
    )


def surfaces() -> tuple[Surface, ...]:
    """Return every surface of this file, with default sizes."""
    factories = (plane, cylinder, cone, sphere, torus, paraboloid, saddle, catenoid, pseudosphere, clifford_torus)
    return tuple(factory() for factory in factories)


def product(first: Function, second: Function, *, split: int = 2) -> Function:
    """Return the product of two charts, with concatenated outputs; planes across the factors have curvature 0.

    The first `split` coordinates go to the first chart.
    """

    def chart(x: Array) -> Array:
        return namespace_of(x).concat([first(x[:split]), second(x[split:])])

    return chart


def _constant(curvature: float) -> _Formula:
    return lambda _, a, b: curvature + 0 * (a + b)
