"""What adding gates to a model did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class RetrofitReport:
    """Which layers have gates now, and what a probe of the model answered before and after."""

    model: str
    """The model's class."""
    gates: str
    """The gates as they are spelled."""
    layers: tuple[str, ...]
    """The paths of the gated attention modules."""
    num_parameters: int
    """Numbers that the gates added to the model."""
    implementations: tuple[str, ...]
    """The attention implementations that the probe was run with."""
    dtype: str
    """The dtype that the probe was run in, the model's own."""
    bitwise_equal: bool
    """Whether the answers to the probe have the same bits as before."""
    largest_change: float
    """The largest difference between the answers; 0 if they are bitwise equal."""

    def __str__(self) -> str:
        """A few lines for a person."""
        found = (
            "gave the same bits as before"
            if self.bitwise_equal
            else f"changed by up to {self.largest_change:.3g}, since these gates do not start at the identity"
        )
        return (
            f"{self.model}: {self.gates} in {len(self.layers)} layers, {self.num_parameters:,} parameters.\n"
            f"A padded probe in {self.dtype}, with {' and '.join(self.implementations)}, {found}."
        )
