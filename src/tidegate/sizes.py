"""The sizes of an attention layer, with the usual defaults filled in."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tidegate._text import echo


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShape:
    """The sizes of an attention layer that decide the shapes of its gates."""

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
        """Fill in the usual defaults: as many key/value heads as heads, and heads that split the width."""
        require_sizes(d_model=d_model, num_heads=num_heads)
        if head_dim is None:
            if d_model % num_heads:
                raise ValueError(
                    f"d_model must be a multiple of num_heads when head_dim is not given; got d_model={d_model}, "
                    f"num_heads={num_heads}. Give head_dim, or change one of them."
                )
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
            raise ValueError(
                f"num_kv_heads must divide num_heads; got num_kv_heads={self.num_kv_heads}, num_heads={self.num_heads}."
            )

    @property
    def group_size(self) -> int:
        """Query heads for each key/value head."""
        return self.num_heads // self.num_kv_heads


def require_sizes(**sizes: object) -> None:
    """Refuse any of these that is not a whole number of at least 1, by its name."""
    for name, size in sizes.items():
        require_size(name, size)


def require_size(name: str, size: object, *, otherwise: str = "", error: type[ValueError] = ValueError) -> None:
    """Refuse what is not a whole number of at least 1.

    otherwise : admits None and says so, such as "or None for a cache that grows"; empty refuses None too
    error     : the class of what is raised
    """
    if size is None and otherwise:
        return
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        alternative = f", {otherwise}" if otherwise else ""
        raise error(f"{name} must be a whole number of at least 1{alternative}; got {echo(size)}.")
