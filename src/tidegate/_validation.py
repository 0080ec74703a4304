"""Input errors as data, and checks that several packages share. Checks take shapes and plain values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from os import PathLike

from tidegate._text import short_repr


class InputError(ValueError):
    """A value from a caller, a file or the command line that cannot be used.

    It reads `<field> must be <expected>, got <got>. <hint>`; without `got`, that part is left out.

    Attributes:
        field: Name of the argument, option or file field; nested as in `curve[3].loss`.
        expected: What the value must be.
        got: The value, or a description of it.
        hint: A remedy in full sentences; may be empty.
    """

    def __init__(self, field: str, *, expected: str, got: object = ..., hint: str = "") -> None:
        """Store the parts, and render the message."""
        self.field, self.expected, self.got, self.hint = field, expected, got, hint
        shown = "" if got is ... else f", got {got if isinstance(got, PathLike) else short_repr(got)}"
        super().__init__(f"{field} must be {expected}{shown}.{hint and ' '}{hint}")

    def inside(self, parent: str) -> InputError:
        """Return the same error about a field of `parent`."""
        joint = "" if self.field.startswith("[") else "."
        error = type(self)(f"{parent}{joint}{self.field}", expected=self.expected, got=self.got, hint=self.hint)
        return error.with_traceback(self.__traceback__)

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the parts in a pickle, as between processes."""
        return partial(type(self), self.field, expected=self.expected, got=self.got, hint=self.hint), ()


def require_bool(name: str, value: object, *, optional: bool = False) -> None:
    """Raise InputError unless the value is True or False, or None if that is allowed.

    Strings and NumPy's booleans are rejected: "no" would count as true, and np.bool_ cannot be written as JSON.
    """
    if type(value) is not bool and not (value is None and optional):
        raise InputError(name, expected="True, False or None" if optional else "True or False", got=value)


def require_size(name: str, size: object, *, optional: bool = False) -> None:
    """Raise InputError unless the value is an integer of at least 1, or None if that is allowed."""
    if size is None and optional:
        return
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InputError(name, expected=f"a positive integer{' or None' if optional else ''}", got=size)


def require_sizes(**sizes: object) -> None:
    """Raise InputError for the first value that is not an integer of at least 1."""
    for name, size in sizes.items():
        require_size(name, size)


def require_choice(name: str, value: object, choices: Sequence[str | None]) -> None:
    """Raise InputError unless the value is one of `choices`."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise InputError(name, expected=f"{', '.join(others)} or {last}", got=value)


def require_dropout(name: str, value: float) -> None:
    """Raise InputError unless the value lies in [0, 1)."""
    if not 0 <= value < 1:
        raise InputError(name, expected="in [0, 1)", got=value)


def require_positive(name: str, value: float) -> None:
    """Raise InputError unless the value is a finite number above 0."""
    if not (value > 0 and math.isfinite(value)):
        raise InputError(name, expected="a finite number above 0", got=value)


def require_mask_shape(given: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raise InputError unless a mask has two or four axes and broadcasts to (batch, heads, queries, keys).

    Three axes are rejected because the first could mean heads or batches.
    """
    fits = len(given) in (2, 4) and all(
        size in (1, wanted) for size, wanted in zip(given, shape[4 - len(given) :], strict=True)
    )
    if not fits:
        raise InputError(
            "mask",
            expected=f"(queries, keys) or (batch, heads, queries, keys) and broadcast to {shape}",
            got=given,
            hint="Pass a padding mask (batch, keys) as mask[:, None, None, :], one per row of the batch as "
            "mask[:, None].",
        )


def require_positions_shape(given: tuple[int, ...], batch: int, num_positions: int) -> None:
    """Raise InputError unless positions are given for one row or for each row of the batch."""
    if given not in ((num_positions,), (1, num_positions), (batch, num_positions)):
        raise InputError("positions", expected=f"of shape ({num_positions},) or ({batch}, {num_positions})", got=given)


def require_tokens(shape: tuple[int, ...], dtype: str) -> None:
    """Raise InputError unless tokens are (batch, positions) integers; `dtype` with or without the library's name."""
    if len(shape) != 2 or dtype.rpartition(".")[2] not in ("int32", "int64"):
        raise InputError("tokens", expected="(batch, positions), int64 or int32", got=(shape, dtype))


def require_known_tokens(smallest: int, largest: int, vocab_size: int, *, name: str = "tokens") -> None:
    """Raise InputError if the smallest or largest token lies outside the vocabulary."""
    if smallest < 0 or largest >= vocab_size:
        expected = f"in [0, {vocab_size}), the model's vocabulary"
        hint = "Use the model's own tokenizer."
        raise InputError(name, expected=expected, got=smallest if smallest < 0 else largest, hint=hint)


def require_known_positions(smallest: int, largest: int, max_length: int) -> None:
    """Raise InputError if the smallest or largest position lies outside the table of learned positions."""
    if smallest < 0 or largest >= max_length:
        expected = f"in [0, {max_length}), the table of learned positions"
        hint = "Shorten tokens, or use positions='rotary'."
        raise InputError("positions", expected=expected, got=smallest if smallest < 0 else largest, hint=hint)


def require_finite_logits(broken_rows: Sequence[int]) -> None:
    """Raise InputError if rows of the batch, listed in `broken_rows`, have logits that are nan or infinite."""
    if broken_rows:
        raise InputError(
            "logits",
            expected="finite to sample from them",
            hint=f"They are nan or infinite in row {', '.join(map(str, broken_rows[:5]))}"
            f"{', …' if len(broken_rows) > 5 else ''} of prompt. Look for nan in the model's weights; in half "
            "precision numbers may have overflowed, so try float32.",
        )


def require_array(name: str, value: object, *, fits: bool, kind: str, remedy: str) -> None:
    """Raise TypeError unless the value `fits` the framework, whose arrays are of a kind such as "a tensor".

    The remedy is a function that returns one, such as "torch.as_tensor".
    """
    if not fits:
        raise TypeError(f"{name} must be {kind}, got {type(value).__name__}. Use {remedy}({name}).")


def require_num_caches(given: int, num_blocks: int) -> None:
    """Raise InputError unless there is one cache for each block."""
    if given != num_blocks:
        raise InputError("caches", expected=f"one KVCache for each of {num_blocks} blocks", got=given)


def require_learned_positions(needed: int, max_length: int) -> None:
    """Raise InputError if tokens run past the table of learned positions."""
    if needed > max_length:
        expected = f"at most max_length={max_length} positions, the table of learned positions"
        raise InputError("tokens", expected=expected, got=needed, hint="Shorten tokens, or use positions='rotary'.")


def require_sampling(temperature: float, top_k: int | None, top_p: float | None) -> None:
    """Raise InputError if an option of sampling is out of range."""
    if not (math.isfinite(temperature) and temperature >= 0):
        raise InputError("temperature", expected="a finite number of at least 0", got=temperature)
    require_size("top_k", top_k, optional=True)
    if top_p is not None and not 0 < top_p <= 1:
        raise InputError("top_p", expected="in (0, 1] or None", got=top_p)


def require_generation(
    prompt: tuple[int, ...], max_new_tokens: int, *, vocab_size: int, named_tokens: Iterable[int]
) -> None:
    """Raise InputError for an empty prompt, for no new tokens, or for stop and pad tokens outside the vocabulary."""
    if len(prompt) != 2 or prompt[1] < 1:
        raise InputError("prompt", expected="(batch, at least one position)", got=prompt)
    require_size("max_new_tokens", max_new_tokens)
    for token in named_tokens:
        if not 0 <= token < vocab_size:
            raise InputError("stop_tokens and pad_token", expected=f"in [0, {vocab_size})", got=token)


def require_prompt_mask(shape: tuple[int, ...], dtype: str, *, prompt: tuple[int, ...]) -> None:
    """Raise InputError unless the mask of a prompt is bool and of the prompt's shape."""
    if dtype.rpartition(".")[2] != "bool" or shape != prompt:
        raise InputError("prompt_mask", expected=f"bool of shape {prompt}, True at tokens", got=(dtype, shape))


def require_left_padding(is_left_padded: object) -> None:
    """Raise InputError unless each row is False before its first token, and True from there on."""
    if not is_left_padded:
        expected = "False before each row's first token, and True from there on"
        raise InputError("prompt_mask", expected=expected, hint="Pad left.")


def require_room(longest: int, max_new_tokens: int, max_length: int) -> None:
    """Raise InputError if the new tokens do not fit the table of learned positions after the longest prompt.

    The last new token is never read, so it needs no room.
    """
    if longest > max_length:
        expected = f"at most max_length={max_length} positions, the table of learned positions"
        raise InputError("prompt", expected=expected, got=longest, hint="Shorten prompt, or use positions='rotary'.")
    room = max_length - longest + 1
    if max_new_tokens > room:
        expected = f"at most {room} after a prompt of {longest}, to fit max_length={max_length}"
        raise InputError("max_new_tokens", expected=expected, got=max_new_tokens)
