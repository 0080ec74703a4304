"""The sizes of an attention layer, and their defaults."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tidegate._validation import InputError, require_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShape:
    """The sizes of an attention layer that determine the shapes of its gates."""

    d_model: int
    """Width of the layer's input and output."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key/value heads; divides `num_heads`."""
    head_dim: int
    """Width of one head."""

    @classmethod
    def of(
        cls, *, d_model: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None
    ) -> HeadShape:
        """Return the sizes with defaults: as many key/value heads as query heads, which split the width."""
        require_sizes(d_model=d_model, num_heads=num_heads)
        if head_dim is None:
            if d_model % num_heads:
                expected = f"a multiple of num_heads={num_heads} when head_dim is not given"
                raise InputError("d_model", expected=expected, got=d_model, hint="Set head_dim, or change one of them.")
            head_dim = d_model // num_heads
        return cls(
            d_model=d_model,
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
        )

    def __post_init__(self) -> None:
        require_sizes(**{field.name: getattr(self, field.name) for field in fields(self)})
        if self.num_heads % self.num_kv_heads:
            raise InputError("num_kv_heads", expected=f"a divisor of num_heads={self.num_heads}", got=self.num_kv_heads)

    @property
    def group_size(self) -> int:
        """Return the number of query heads per key/value head."""
        return self.num_heads // self.num_kv_heads
