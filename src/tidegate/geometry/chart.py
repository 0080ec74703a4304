"""A chart: a map from coordinates to outputs that knows where it starts and how much room it has to bend."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tidegate.geometry.differentiation import Function
from tidegate.tensors.namespace import Array


@dataclass(frozen=True, kw_only=True, eq=False)
class Chart:
    """A map from coordinates to outputs, with the point that it was built around."""

    name: str
    function: Function
    """Takes coordinates (dimension,) and returns outputs (ambient_dimension,)."""
    start: Array
    """(dimension,): the coordinates of what the layer itself computes."""
    ambient_dimension: int
    note: str
    """What moves, what stays, and what comes out."""

    def __call__(self, x: Array) -> Array:
        """Return the outputs at coordinates (dimension,)."""
        return self.function(x)

    @property
    def dimension(self) -> int:
        """The number of coordinates."""
        return self.start.shape[-1]

    @property
    def codimension(self) -> int:
        """Outputs beyond the coordinates: the room to bend in; below 0 the chart cannot be of full rank."""
        return self.ambient_dimension - self.dimension

    @property
    def says_something(self) -> bool:
        """Whether *full* curvature can be anything but 0: it needs two coordinates and codimension 1."""
        return self.dimension >= 2 and self.codimension >= 1

    def slice(self, u: Array, v: Array) -> Chart:
        """Return the two-dimensional surface through the start along u and v, (dimension,), as a chart of its own.

        Its Gaussian curvature at the start is the sectional curvature with `tangent="plane"`.
        """

        def surface(at: Array) -> Array:
            return self.function(self.start + at[0] * u + at[1] * v)

        return replace(
            self,
            name=f"slice of {self.name}",
            function=surface,
            start=0 * self.start[:2],
            note=f"A slice of two dimensions. {self.note}",
        )
