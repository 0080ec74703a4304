"""Checks of a layer's and a model's inputs, with one wording for every framework. Shapes and plain values in."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tidegate._text import echo
from tidegate.gates import Gates
from tidegate.sizes import require_size


def require_bool(name: str, value: object, *, otherwise: str = "") -> None:
    """Refuse what is neither True nor False: a string counts as true, whatever it says, and so does "no".

    NumPy's own kind is refused too, as its whole numbers are for sizes: it goes into no JSON.

    otherwise : admits None and says so, such as "or None to ask the module"; empty refuses None too
    """
    if type(value) is bool or (value is None and otherwise):
        return
    alternative = f", {otherwise}" if otherwise else ""
    raise ValueError(f"{name} must be True or False{alternative}; got {echo(value)}.")


def require_layer_options(*, dropout: float, window: int | None, temperature: float) -> None:
    """Refuse options of a layer that lie outside their ranges."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must lie in [0, 1); got {echo(dropout)}.")
    require_size("window", window, otherwise="or None")
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature must be a finite number above 0; got {echo(temperature)}.")


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
    """Refuse inputs that do not fit the layer or each other.

    x, context : their shapes; a context is None in self-attention
    ordered    : whether the layer is causal or has a window
    packed     : the name of the argument that says which positions belong together, if it was given
    """
    for name, given in (("x", x), ("context", context)):
        if given is not None and (len(given) != 3 or given[-1] != d_model):
            raise ValueError(f"{name} must have shape (batch, positions, {d_model}); got {tuple(given)}.")
    if packed is not None and (context is not None or has_cache):
        raise ValueError(f"{packed} are for self-attention over whole rows; use mask with a context or a cache.")
    for gate in gates:
        gate.require_other_sequences(x[0], cached=has_cache)
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
    """Refuse a mask without two or four axes, or that does not broadcast to (batch, heads, queries, keys).

    Three axes could mean heads or batches.
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
    """Refuse positions that are given neither for one row nor for each row of the batch."""
    if given not in ((num_positions,), (1, num_positions), (batch, num_positions)):
        allowed = f"({num_positions},) or ({batch}, {num_positions})"
        raise ValueError(f"positions must have shape {allowed}; got {given}.")


def require_tokens(shape: tuple[int, ...], dtype: str) -> None:
    """Refuse tokens that are not (batch, positions) integers.

    dtype : its name, with or without that of its library
    """
    if len(shape) != 2 or dtype.rpartition(".")[2] not in ("int32", "int64"):
        raise ValueError(f"tokens must be (batch, positions), int64 or int32; got {shape}, {dtype}.")


def require_known_tokens(smallest: int, largest: int, vocab_size: int, *, name: str = "tokens") -> None:
    """Refuse tokens outside the vocabulary.

    smallest, largest : of the tokens
    name              : of the argument
    """
    if smallest < 0 or largest >= vocab_size:
        raise ValueError(
            f"{name} must lie in [0, {vocab_size}), the model's vocabulary; got "
            f"{smallest if smallest < 0 else largest}. Use the tokenizer that belongs to the model."
        )


def require_known_positions(smallest: int, largest: int, max_length: int) -> None:
    """Refuse positions that the table of learned ones does not have.

    smallest, largest : of the positions
    """
    if smallest < 0 or largest >= max_length:
        raise ValueError(
            f"positions must lie in [0, {max_length}), the table of learned positions; got "
            f"{smallest if smallest < 0 else largest}. Shorten tokens, or use positions='rotary'."
        )


def require_finite_logits(broken_rows: Sequence[int]) -> None:
    """Refuse to draw tokens by logits whose largest is nan or infinite.

    broken_rows : the rows of the batch with such logits
    """
    if broken_rows:
        shown = ", ".join(map(str, broken_rows[:5])) + (", …" if len(broken_rows) > 5 else "")
        raise ValueError(
            f"Nothing can be drawn from logits that are nan or infinite, as in row {shown} of prompt. Look for nan in "
            "the model's weights; in half precision numbers may have grown too large, so try float32."
        )


def require_num_logits(num_logits: int | None) -> None:
    """Refuse to compute logits of less than one position."""
    require_size("num_logits", num_logits, otherwise="or None for all positions")


def require_array(name: str, value: object, *, fits: bool, kind: str, remedy: str) -> None:
    """Refuse what is no array of the framework, such as a list.

    fits   : whether it is one
    kind   : what the framework calls one, such as "a tensor"
    remedy : what makes one, such as "torch.as_tensor"
    """
    if not fits:
        raise TypeError(f"{name} must be {kind}; got {type(value).__name__}. Make one with {remedy}({name}).")


def require_num_caches(given: int, num_blocks: int) -> None:
    """Refuse caches unless there is one for each block."""
    if given != num_blocks:
        raise ValueError(f"caches must hold one KVCache for each of {num_blocks} blocks; got {given}.")


def require_learned_positions(needed: int, max_length: int) -> None:
    """Refuse tokens beyond the end of the table of learned positions."""
    if needed > max_length:
        raise ValueError(
            f"The table of learned positions ends at max_length={max_length}; {needed} are needed. "
            "Shorten tokens, or use positions='rotary'."
        )


def require_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Refuse options of sampling that lie outside their ranges."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise ValueError(f"temperature must be a finite number, 0 or above; got {echo(temperature)}.")
    require_size("top_k", top_k, otherwise="or None")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], or be None; got {echo(top_p)}.")


def require_generation(
    prompt: tuple[int, ...], max_new_tokens: int, *, vocab_size: int, named_tokens: Iterable[int]
) -> None:
    """Refuse an empty prompt, nothing to add, or named tokens that the vocabulary lacks.

    prompt       : its shape
    named_tokens : those that stop a row and the one that fills it
    """
    if len(prompt) != 2 or prompt[1] < 1:
        raise ValueError(f"prompt must be (batch, at least one position); got {prompt}.")
    require_size("max_new_tokens", max_new_tokens)
    for token in named_tokens:
        if not 0 <= token < vocab_size:
            raise ValueError(f"stop_tokens and pad_token must lie in [0, {vocab_size}); got {echo(token)}.")


def require_prompt_mask(shape: tuple[int, ...], dtype: str, *, prompt: tuple[int, ...]) -> None:
    """Refuse a mask of a prompt that is not bool, or not of the prompt's shape."""
    if dtype.rpartition(".")[2] != "bool" or shape != prompt:
        raise ValueError(f"prompt_mask must be bool of shape {prompt}, True at tokens; got {dtype} of shape {shape}.")


def require_left_padding(holds: object) -> None:
    """Refuse a mask of a prompt unless each row is False up to its first token and True from there to the end."""
    if not holds:
        raise ValueError("prompt_mask must be False at the left and True from there to the end: pad at the left.")


def require_room(longest: int, max_new_tokens: int, max_length: int) -> None:
    """Refuse more new tokens than the table of learned positions has room for after the longest prompt.

    The last new token is drawn and never read, so that it needs no room.
    """
    if longest > max_length:
        raise ValueError(
            f"prompt has {longest} positions; the table of learned positions ends at max_length={max_length}. "
            "Shorten prompt, or use positions='rotary'."
        )
    if longest + max_new_tokens - 1 > max_length:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} after a prompt of {longest} runs past the learned positions, which end "
            f"at max_length={max_length}. Ask for at most {max_length - longest + 1}."
        )
