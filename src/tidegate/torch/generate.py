"""Generate text from a language model, token by token with a cache.

Legend: B batch, T positions of the prompt, N new tokens, V tokens of the vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tidegate._text import short_repr
from tidegate._validation import (
    InputError,
    require_finite_logits,
    require_generation,
    require_known_tokens,
    require_left_padding,
    require_prompt_mask,
    require_room,
    require_sampling,
    require_tokens,
)
from tidegate.torch.kernel import inside_transform, is_plain
from tidegate.torch.precision import is_under_autocast, require_tensor, widen

if TYPE_CHECKING:
    from tidegate.torch.decoder import TransformerLM


@torch.no_grad()
def generate(
    model: TransformerLM,
    prompt: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    generator: torch.Generator | None = None,
    prompt_mask: Tensor | None = None,
    pad_token: int = 0,
) -> Tensor:
    """Continue the prompts.

    Args:
        model: The model, in evaluation mode if it has dropout.
        prompt: (B, T) tokens.
        max_new_tokens: Maximum number of new tokens; fewer if every row stops earlier.
        temperature: Divides the logits; 0 takes the most likely token.
        top_k: Sample from this number of most likely tokens.
        top_p: Sample from the nucleus, the smallest set of most likely tokens with this total probability.
        stop_tokens: A row stops after the first of these that it samples, and is filled with `pad_token`.
        generator: The random generator; None is PyTorch's global one.
        prompt_mask: (B, T) bool, False where a shorter prompt is padded on the left; None is no padding.
        pad_token: Fills the rest of a row that has stopped.

    Returns:
        (B, T + N), the prompts and N ≤ `max_new_tokens` tokens after them.

    Raises:
        InputError: An option is out of range, the model is in training mode with dropout, or the largest logit of a row
            is nan or infinite, at any temperature. Logits are checked after each step on the CPU, and at the end on
            other devices, so that no step waits.
        TypeError: `stop_tokens` is a single token.
    """
    require_sampling(temperature, top_k, top_p)
    if isinstance(stop_tokens, int) or not isinstance(stop_tokens, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"stop_tokens must be several token ids, such as [5]; got {short_repr(stop_tokens)}.")
    stop_tokens = [int(token) for token in stop_tokens]
    _check_request(model, prompt, max_new_tokens, prompt_mask, (*stop_tokens, pad_token))
    length, room = prompt.shape[1], prompt.shape[1] + max_new_tokens - 1
    caches = model.new_caches(room)
    stops = torch.tensor(stop_tokens, dtype=prompt.dtype, device=prompt.device)
    stopped_B1 = torch.zeros_like(prompt[:, :1], dtype=torch.bool)
    broken_B1 = torch.zeros_like(stopped_B1)
    visible = None if prompt_mask is None else F.pad(prompt_mask, (0, room - length), value=True)
    # Positions count from each row's first token.
    positions = None if visible is None else (visible.cumsum(dim=1) - 1).clamp(min=0)
    tokens, new, rows = prompt, prompt, prompt.shape[0]
    reader = pack(model, rows) if pays_to_pack(model, rows=rows, steps=max_new_tokens - 1) else model
    for end in range(length, room + 1):
        mask = None if visible is None else visible[:, None, None, :end]
        new_positions = None if positions is None else positions[:, end - new.shape[1] : end]
        # The tokens, which outlive this call, are concatenated outside.
        with torch.inference_mode():
            read = model if end == length else reader
            logits_BV = read(new, caches=caches, mask=mask, positions=new_positions, num_logits=1)[:, 0]
        drawn_B1, usable_B1 = _draw(logits_BV, temperature, top_k, top_p, generator)
        broken_B1 = broken_B1 | ~(usable_B1 | stopped_B1)
        if prompt.device.type == "cpu":
            _require_usable(broken_B1)
        new = torch.where(stopped_B1, pad_token, drawn_B1).to(prompt.dtype)
        tokens = torch.cat((tokens, new), dim=1)
        if stop_tokens:
            stopped_B1 = stopped_B1 | torch.isin(new, stops)
            if stopped_B1.all():
                break
    _require_usable(broken_B1)
    return tokens


def next_token_probabilities(
    logits: Tensor, *, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    r"""Return the probabilities of the next token: $p_v \propto \exp(l_v/T)$ if both filters keep it, 0 otherwise.

    The nucleus is taken among the tokens that `top_k` keeps. Equal logits are ranked by index, so that exactly `top_k`
    tokens stay; the most likely one always stays. Temperature 0 is the limit: the most likely token has probability 1.

    Args:
        logits: (..., V).
        temperature: Divides the logits.
        top_k: Keep this number of most likely tokens.
        top_p: Keep the fewest most likely tokens that together have this probability.

    Returns:
        (..., V), in float32 or better.

    Raises:
        InputError: An option is out of range.
    """
    require_sampling(temperature, top_k, top_p)
    ranked, order = widen(logits).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    if temperature == 0:
        top_k, temperature = 1, 1.0
    # Relative to the largest, so that a temperature near 0 cannot overflow.
    ranked = (ranked - ranked[..., :1]) / temperature
    if top_k is not None:
        ranked = ranked.masked_fill(rank >= top_k, float("-inf"))
    probabilities = ranked.softmax(dim=-1)
    if top_p is not None:
        before = probabilities.cumsum(dim=-1) - probabilities
        kept = probabilities.masked_fill((before >= top_p) & (rank > 0), 0.0)
        probabilities = kept / kept.sum(dim=-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(-1, order, probabilities)


def _draw(
    logits_BV: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator | None
) -> tuple[Tensor, Tensor]:
    """Draw one token for each row, (B, 1); return the tokens, and where the logits are finite."""
    # The largest logit is nan if any is.
    largest_B1, likeliest_B1 = logits_BV.max(dim=-1, keepdim=True)
    usable_B1 = largest_B1.isfinite()
    if temperature == 0:
        return likeliest_B1, usable_B1
    # Replace logits that are not finite: sampling from nan would end a GPU process before the error can be raised.
    logits_BV = torch.where(usable_B1, logits_BV, 0.0)
    probabilities = next_token_probabilities(logits_BV, temperature=temperature, top_k=top_k, top_p=top_p)
    return torch.multinomial(probabilities, 1, generator=generator), usable_B1


def _require_usable(broken_B1: Tensor) -> None:
    if not torch.compiler.is_compiling():
        require_finite_logits(broken_B1[:, 0].nonzero()[:, 0].tolist())


def _check_request(
    model: TransformerLM, prompt: Tensor, max_new_tokens: int, prompt_mask: Tensor | None, named: tuple[int, ...]
) -> None:
    config = model.config
    require_tensor("prompt", prompt)
    require_generation(tuple(prompt.shape), max_new_tokens, vocab_size=config.vocab_size, named_tokens=named)
    require_tokens(tuple(prompt.shape), str(prompt.dtype))
    if prompt.numel() and not torch.compiler.is_compiling():
        require_known_tokens(int(prompt.min()), int(prompt.max()), config.vocab_size, name="prompt")
    if model.training and (config.dropout or config.attention_dropout):
        raise InputError("model", expected="in evaluation mode, without dropout", hint="Call model.eval() first.")
    longest = prompt.shape[1]
    if prompt_mask is not None:
        require_prompt_mask(tuple(prompt_mask.shape), str(prompt_mask.dtype), prompt=tuple(prompt.shape))
        require_left_padding(prompt_mask[:, -1].all() and (prompt_mask[:, 1:] >= prompt_mask[:, :-1]).all())
        longest = int(prompt_mask.any(dim=0).sum())
    if config.positions == "learned":
        require_room(longest, max_new_tokens, config.max_length)


# With few rows, a plain product does not reach the memory bandwidth of a CPU. Generating 64 tokens for 8 prompts with 6
# layers of width 512 takes 0.75 of the time with packed weights; packing takes the time that 20 to 40 steps save.
_ROWS = range(2, 17)
_LEAST_STEPS = 48
_MOST_BYTES = 2**30


def pays_to_pack(model: nn.Module, *, rows: int, steps: int) -> bool:
    """Return whether `steps` steps of `rows` rows are faster with packed weights: in float32, up to 1 GiB of them."""
    weights = list(model.parameters())
    return (
        rows in _ROWS
        and steps >= _LEAST_STEPS
        and torch.backends.mkldnn.is_available()
        and all(weight.dtype == torch.float32 and weight.device.type == "cpu" for weight in weights)
        and sum(weight.nbytes for weight in weights) <= _MOST_BYTES
        # Such an embedding changes its weights, which may be those of the head, as it is read.
        and all(part.max_norm is None for part in model.modules() if isinstance(part, nn.Embedding))
        and is_plain(*weights)
        and not (torch.compiler.is_compiling() or inside_transform(*weights) or is_under_autocast(weights[0]))
    )


def pack(model: TransformerLM, rows: int) -> TransformerLM:
    """Return a copy of a model for inference, with packed weights for this number of rows in its linear layers.

    It shares everything else with the model, hooks included. Later changes of those weights do not reach the copy.
    """
    packed = cast("TransformerLM", _pack(model, rows))
    if packed.head is None:
        head = nn.Linear(1, 1, bias=False, device="meta")
        head.weight = packed.embedding.weight
        packed.head = cast("nn.Linear", _pack(head, rows))
    return packed


def _pack(module: nn.Module, rows: int) -> nn.Module:
    packed = copy.copy(module)
    if type(module) is nn.Linear and "forward" not in vars(module):
        # The product that PyTorch's own compiler calls for frozen weights; it has no public name.
        weight = torch.ops.mkldnn._reorder_linear_weight(module.weight.detach(), rows)
        product, bias = torch.ops.mkldnn._linear_pointwise.default, module.bias

        def forward(x: Tensor) -> Tensor:
            return product(x, weight, bias, "none", [], "")

        packed.forward = forward
    parts = vars(module)["_modules"].items()
    vars(packed)["_modules"] = {name: part if part is None else _pack(part, rows) for name, part in parts}
    return packed
