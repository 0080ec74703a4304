"""Sampling from a language model, token by token with a cache, all of it compiled.

Legend: B batch, T positions of the prompt, S positions of the cache, N new tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer

from tidegate._validation import (
    InputError,
    require_array,
    require_finite_logits,
    require_generation,
    require_left_padding,
    require_prompt_mask,
    require_room,
    require_sampling,
    require_tokens,
)
from tidegate.config import TransformerConfig
from tidegate.flax.block import Caches, stack_layers
from tidegate.flax.decoder import apply_model_cached, init_caches, require_vocabulary
from tidegate.flax.gate import widen
from tidegate.flax.params import Params


def generate(
    params: Params,
    prompt: Array,
    config: TransformerConfig,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    key: Array | None = None,
    prompt_mask: Array | None = None,
    pad_token: int = 0,
) -> Array:
    """Continue the prompts and return (B, T + N): the prompts and N ≤ `max_new_tokens` new tokens.

    Outside `jit`, lengths of prompts and continuations are rounded up to 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, ...,
    with masked padding at the left, and the loop is compiled once for each pair of rounded lengths and each set of
    options. Inside the caller's `jit`, N is `max_new_tokens`, and the values of prompt and mask are not checked.

    A row stops when its largest logit is nan or infinite. Outside `jit` this raises InputError after the loop; inside,
    the row continues with `pad_token`.

    Args:
        params: From `init_model`.
        prompt: (B, T) tokens.
        config: The model's options; static.
        max_new_tokens: Largest number of new tokens; fewer are returned only if every row has stopped.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample from this many most likely tokens.
        top_p: Sample from the nucleus, the fewest most likely tokens whose probabilities sum to this.
        stop_tokens: A row stops after the first of these that it samples, and continues with `pad_token`.
        key: Key for sampling; required unless the temperature is 0.
        prompt_mask: (B, T) bool, False where a shorter prompt is padded at the left; None has no padding.
        pad_token: Token that fills rows that have stopped.
    """
    require_sampling(temperature, top_k, top_p)
    _check_request(prompt, config, max_new_tokens, prompt_mask, (*stop_tokens, pad_token))
    if key is None and temperature > 0:
        expected = f"a key to sample at temperature={temperature!r}"
        raise InputError("key", expected=expected, got=None, hint="Pass jax.random.key(0).")
    sampling = _Sampling(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_tokens=tuple(int(token) for token in stop_tokens),
        pad_token=pad_token,
    )
    padded, padded_mask, most_new_tokens = prompt, prompt_mask, max_new_tokens
    if not any(isinstance(given, Tracer) for given in jax.tree.leaves((params, prompt, prompt_mask, key))):
        padded, padded_mask = _lengthen(prompt, prompt_mask, _round_up(prompt.shape[1]))
        most_new_tokens = _round_up(max_new_tokens)
    new_BN, num_drawn, broken_B = _generate(
        params, padded, padded_mask, key, max_new_tokens, config, sampling, most_new_tokens
    )
    num_new = max_new_tokens
    if not isinstance(num_drawn, Tracer):
        # Once, after the loop, which cannot raise.
        require_finite_logits(jax.device_get(broken_B).nonzero()[0].tolist())
        num_new = int(num_drawn)
    return jnp.concatenate((prompt, new_BN[:, :num_new]), axis=1)


def next_token_probabilities(
    logits: Array, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Array:
    r"""Return $p_v \propto \exp(l_v/T)$ on the tokens that both filters keep, 0 elsewhere, for logits (..., V).

    The nucleus is taken among the tokens that `top_k` keeps. Equal logits are ranked by index, so that exactly `top_k`
    tokens remain. The most likely token always remains; at temperature 0 its probability is 1. The result is float32 or
    better.
    """
    require_sampling(temperature, top_k, top_p)
    # Not `jax.lax.top_k`, which ranks 0 above -0.
    order = jnp.argsort(widen(logits), axis=-1, descending=True, stable=True)
    ranked = jnp.take_along_axis(widen(logits), order, axis=-1)
    rank = jnp.arange(logits.shape[-1])
    if temperature == 0:
        top_k, temperature = 1, 1.0
    # Relative to the largest, so that a temperature near 0 cannot overflow.
    ranked = (ranked - ranked[..., :1]) / temperature
    if top_k is not None:
        ranked = jnp.where(rank < top_k, ranked, -jnp.inf)
    probabilities = jax.nn.softmax(ranked, axis=-1)
    if top_p is not None:
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        kept = jnp.where((before < top_p) | (rank == 0), probabilities, 0)
        probabilities = kept / jnp.sum(kept, axis=-1, keepdims=True)
    return jnp.put_along_axis(jnp.zeros_like(probabilities), order, probabilities, axis=-1, inplace=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sampling:
    """Sampling options."""

    temperature: float
    top_k: int | None
    top_p: float | None
    stop_tokens: tuple[int, ...]
    pad_token: int


class _Progress(NamedTuple):
    """The state of the generation loop."""

    num_drawn: Array
    """(): number of tokens sampled so far."""
    new_BN: Array
    """The sampled tokens, then padding."""
    stopped_B: Array
    broken_B: Array
    """Rows that stopped because of non-finite logits."""
    caches: Caches
    key: Array | None


def _round_up(length: int) -> int:
    """Return the next compiled length: 16, then four to each doubling."""
    step = max(4, 1 << (length - 1).bit_length() >> 3)
    return max(16, step * -(-length // step))


@functools.partial(jax.jit, static_argnames="length")
def _lengthen(prompt: Array, prompt_mask: Array | None, length: int) -> tuple[Array, Array]:
    """Return the prompt padded at the left, and its mask."""
    if prompt_mask is None:
        prompt_mask = jnp.ones(prompt.shape, bool)
    padding = ((0, 0), (length - prompt.shape[1], 0))
    # Padding repeats the row's first token: another embedding may be nan, which a mask does not remove.
    return jnp.pad(prompt, padding, mode="edge"), jnp.pad(prompt_mask, padding)


@functools.partial(jax.jit, static_argnames=("config", "sampling", "most_new_tokens"))
def _generate(
    params: Params,
    prompt: Array,
    prompt_mask: Array | None,
    key: Array | None,
    max_new_tokens: Array | int,
    config: TransformerConfig,
    sampling: _Sampling,
    most_new_tokens: int,
) -> tuple[Array, Array, Array]:
    """Return new tokens (B, most_new_tokens ≥ max_new_tokens), the number of sampled ones, and the broken rows (B,)."""
    batch, length = prompt.shape
    num_positions = length + most_new_tokens - 1
    mask_BS = positions_BS = None
    if prompt_mask is not None:
        # The real keys, and their positions counted from each row's first token.
        mask_BS = jnp.pad(prompt_mask, ((0, 0), (0, most_new_tokens - 1)), constant_values=True)
        positions_BS = jnp.maximum(jnp.cumsum(mask_BS, axis=1) - 1, 0)

    def advance(state: _Progress, tokens: Array, start: Array | int) -> _Progress:
        """Process tokens from the position `start` on, and sample the next ones."""
        positions = None
        if positions_BS is not None:
            positions = jax.lax.dynamic_slice_in_dim(positions_BS, start, tokens.shape[1], axis=1)
        logits_B1V, caches = apply_model_cached(
            params,
            tokens,
            config,
            state.caches,
            mask=None if mask_BS is None else mask_BS[:, None, None, :],
            positions=positions,
            num_logits=1,
        )
        # The largest logit is nan if any is.
        usable_B = jnp.isfinite(jnp.max(logits_B1V[:, 0], axis=-1))
        broken_B = state.broken_B | ~(usable_B | state.stopped_B)
        drawn_B, key = _draw(logits_B1V[:, 0], sampling, state.key)
        drawn_B = jnp.where(state.stopped_B, sampling.pad_token, drawn_B).astype(prompt.dtype)
        return _Progress(
            num_drawn=state.num_drawn + 1,
            new_BN=jax.lax.dynamic_update_slice_in_dim(state.new_BN, drawn_B[:, None], state.num_drawn, axis=1),
            stopped_B=state.stopped_B | broken_B | jnp.isin(drawn_B, jnp.asarray(sampling.stop_tokens, prompt.dtype)),
            broken_B=broken_B,
            caches=caches,
            key=key,
        )

    def is_unfinished(state: _Progress) -> Array:
        unfinished = state.num_drawn < max_new_tokens
        # An empty batch never stops.
        return unfinished & ~jnp.all(state.stopped_B) if sampling.stop_tokens or batch else unfinished

    def step(state: _Progress) -> _Progress:
        last_B1 = jax.lax.dynamic_slice_in_dim(state.new_BN, state.num_drawn - 1, 1, axis=1)
        return advance(state, last_B1, length + state.num_drawn - 1)

    dtype = params["embedding"]["embedding"].dtype
    caches = init_caches(config, batch=batch, max_length=num_positions, dtype=dtype)
    start = _Progress(
        num_drawn=jnp.zeros((), jnp.int32),
        new_BN=jnp.full((batch, most_new_tokens), sampling.pad_token, prompt.dtype),
        stopped_B=jnp.zeros(batch, bool),
        broken_B=jnp.zeros(batch, bool),
        caches=stack_layers(caches) if isinstance(params["stack"]["blocks"], Mapping) else caches,
        key=key,
    )
    end = jax.lax.while_loop(is_unfinished, step, advance(start, prompt, 0))
    return end.new_BN, end.num_drawn, end.broken_B


def _draw(logits_BV: Array, sampling: _Sampling, key: Array | None) -> tuple[Array, Array | None]:
    """Sample a token for each row (B,); also return the next key."""
    if key is None or sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1), key
    own, key = jax.random.split(key)
    probabilities = next_token_probabilities(
        logits_BV, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
    )
    return jax.random.categorical(own, jnp.log(probabilities), axis=-1), key


def _check_request(
    prompt: Array,
    config: TransformerConfig,
    max_new_tokens: int,
    prompt_mask: Array | None,
    named_tokens: tuple[int, ...],
) -> None:
    require_array("prompt", prompt, fits=hasattr(prompt, "dtype"), kind="an array", remedy="jnp.asarray")
    require_generation(tuple(prompt.shape), max_new_tokens, vocab_size=config.vocab_size, named_tokens=named_tokens)
    require_tokens(tuple(prompt.shape), str(prompt.dtype))
    require_vocabulary(prompt, config, name="prompt", wait=True)
    longest = prompt.shape[1]
    if prompt_mask is not None:
        require_prompt_mask(tuple(prompt_mask.shape), str(prompt_mask.dtype), prompt=tuple(prompt.shape))
        if not isinstance(prompt_mask, Tracer):
            require_left_padding(prompt_mask[:, -1].all() & (prompt_mask[:, 1:] >= prompt_mask[:, :-1]).all())
            longest = int(prompt_mask.any(axis=0).sum())
    if config.positions == "learned":
        require_room(longest, max_new_tokens, config.max_length)
