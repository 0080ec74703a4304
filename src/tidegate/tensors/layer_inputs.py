"""What a layer refuses, and in which words: the same for every framework. Shapes in, errors out."""

from __future__ import annotations

import math

from tidegate.gates import Gates


def require_layer_options(*, dropout: float, window: int | None, temperature: float) -> None:
    """The options of a layer lie in their ranges."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must lie in [0, 1); got {dropout!r}.")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"window must be a whole number of at least 1, or None; got {window!r}.")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be a finite number above 0; got {temperature!r}.")


def require_layer_inputs(
    gates: Gates,
    d_model: int,
    *,
    x: tuple[int, ...],
    context: tuple[int, ...] | None,
    ordered: bool,
    has_cache: bool,
    packed: str | None,
) -> None:
    """The inputs fit the layer and each other.

    x, context : their shapes; a context is None in self-attention
    ordered    : whether the layer is causal or has a window
    packed     : the name of the argument that says which positions belong together, if it was given
    """
    for name, given in (("x", x), ("context", context)):
        if given is not None and (len(given) != 3 or given[-1] != d_model):
            raise ValueError(f"{name} must have shape (batch, positions, {d_model}); got {tuple(given)}.")
    if packed is not None and (context is not None or has_cache):
        raise ValueError(f"{packed} are for self-attention over whole rows; use mask with a context or a cache.")
    if context is None:
        return
    if context[0] != x[0]:
        raise ValueError(f"context must have the batch size of x, {x[0]}; got {context[0]}.")
    if has_cache:
        raise ValueError("cache is for self-attention; a context is there as a whole, so it needs none.")
    if ordered:
        raise ValueError(
            "context was given to a layer that is causal or has a window, which compare positions of one sequence. "
            "Cross-attention needs a layer that is not causal and has no window."
        )
    gates.require_cross_attention()


def require_mask_shape(given: tuple[int, ...], shape: tuple[int, int, int, int]) -> None:
    """A mask of the shape `given` has two or all four axes, and broadcasts to (batch, heads, queries, keys).

    With three axes, nobody could tell heads from batches.
    """
    fits = len(given) in (2, 4) and all(
        size in (1, wanted) for size, wanted in zip(given, shape[4 - len(given) :], strict=True)
    )
    if not fits:
        raise ValueError(
            f"mask must be (queries, keys) or (batch, heads, queries, keys) and broadcast to {shape}; got {given}. "
            "A padding mask (batch, keys) goes in as mask[:, None, None, :], one per row of the batch as mask[:, None]."
        )


def require_positions_shape(given: tuple[int, ...], batch: int, num_positions: int) -> None:
    """Positions are given for one row, or for each row of the batch."""
    if given not in ((num_positions,), (1, num_positions), (batch, num_positions)):
        allowed = f"({num_positions},) or ({batch}, {num_positions})"
        raise ValueError(f"positions must have shape {allowed}; got {given}.")
