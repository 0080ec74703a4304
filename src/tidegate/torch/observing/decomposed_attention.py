"""Recognize attention that a model computes from separate operators: a product, a softmax, a product with the values.

Operators are followed below autograd. The result of a batched product is traced by its storage through operators that
keep its size, such as scales, biases, masks, casts and copies. If it reaches a softmax over its last axis, and the
softmax's result is the first factor of a batched product over the same axis, this is attention, and the input of the
softmax is its scores. Any other softmax whose result enters a batched product may be attention too, and is reported:
scores that are mixed or extended by a sink before the softmax, or weights as the second factor. Weights that change
between softmax and product are reported too: all of them are compared, with dropout applied if its operators were
intercepted.

Legend: B batch, T query positions, S attended positions, H heads, D head width, N products of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tidegate.torch.kernel import is_plain
from tidegate.torch.observing.statistics import FORBIDDEN, AttentionCall
from tidegate.torch.precision import widen

_aten: Any = torch.ops.aten

_FACTORS = {_aten.bmm.default: slice(2), _aten.baddbmm.default: slice(1, 3)}
"""The batched products, and the arguments that are the factors."""
_softmax = _aten._softmax.default
COMPOSITES = {_aten.matmul.default, _aten.einsum.default, _aten.softmax.int, _aten.dropout.default}
"""Operators that reach a dispatch mode whole in inference mode, and as their parts otherwise."""

_bernoulli = _aten.bernoulli_.float
_native_dropout = _aten.native_dropout.default
"""The operators of dropout: one draws factors for a later product, the other also multiplies."""

_NUM_TRACED = 64
"""Products that are traced at a time; there are few between scores and their softmax."""
_NUM_PENDING = 2
"""Results of a softmax that may wait for their products at a time."""
_NUM_COMPARED = 1 << 20
"""Weights that are compared at a time."""

_OTHER_FORM = "it is not a product of queries and keys, a softmax over its last axis, and its product with the values"
_CHANGED = "its result was changed before the product with the values"


class _Product(NamedTuple):
    """A product that may become scores."""

    storage: StorageWeakRef
    """Stored so that no other storage gets the same address."""
    query_NTD: Tensor
    key_NDS: Tensor


@dataclass(slots=True, eq=False)
class _Weights:
    """The result of a softmax, until it meets the values."""

    product: _Product | None
    """None if the input of the softmax is not the result of a product."""
    scores: Tensor | None
    """The input of the softmax; None without a product."""
    storages: dict[int, StorageWeakRef] = field(default_factory=dict)
    """Storages of the weights and of the tensors computed from them."""
    noise: list[Tensor] = field(default_factory=list)
    """The factors of dropout applied to them."""
    drawn: Tensor | None = None
    """The factors of a dropout that is not yet applied."""


class DecomposedAttention:
    """Follow the operators of one thread, and assemble attention calls."""

    def __init__(self) -> None:
        self._products: dict[int, _Product] = {}
        self._pending: list[_Weights] = []

    def follow(self, func: Any, args: tuple[Any, ...], result: Any) -> AttentionCall | str | None:
        """Follow an executed operator; return the call that it completes, or the reason why this is uncertain."""
        if func in _FACTORS:
            left, right = args[_FACTORS[func]]
            return self._follow_product(left, right, result)
        if func is _softmax:
            self._follow_softmax(args[0], args[1], result)
        elif func is _bernoulli and self._pending and _can_be_traced(result):
            for weights in self._pending:
                # It was allocated like the weights, but is not derived from them.
                weights.storages.pop(_storage_id(result), None)
                weights.drawn = result.detach()
        elif func is _native_dropout:
            given, probability, (dropped, kept) = args[0], args[1], result
            weights = self._weights_in(given)
            if weights is not None and probability < 1:
                weights.noise.append(kept / (1 - probability))
            self._pass_on((given,), dropped)
        elif func is _aten.cat.default:
            # Weights that are put together are not those of one softmax, and their product is reported.
            for weights in filter(None, map(self._weights_in, args[0])):
                weights.storages[_storage_id(result)] = StorageWeakRef(result.untyped_storage())
        elif self._products or self._pending:
            self._pass_on(args, result[0] if isinstance(result, tuple) and result else result)
        return None

    def _weights_in(self, x: Any) -> _Weights | None:
        """Return the latest weights that share a storage with x."""
        if not _can_be_traced(x):
            return None
        place = _storage_id(x)
        return next((weights for weights in reversed(self._pending) if place in weights.storages), None)

    def _follow_product(self, left: Tensor, right: Tensor, result: Tensor) -> AttentionCall | str | None:
        if not (_can_be_traced(left) and _can_be_traced(right)):
            return None
        if (weights := self._weights_in(left)) is not None:
            self._pending.remove(weights)
            return _as_call(weights, left, right, result)
        if (weights := self._weights_in(right)) is not None:
            self._pending.remove(weights)
            return _OTHER_FORM
        # A product over one channel, as of rotary angles, is not a product of queries and keys.
        if left.shape[-1] > 1:
            newest = list(self._products.items())[-_NUM_TRACED:]
            self._products = {place: product for place, product in newest if not product.storage.expired()}
            self._trace(result, left.detach(), right.detach())
        return None

    def _follow_softmax(self, scores: Tensor, dim: int, weights: Tensor) -> None:
        if not _can_be_traced(weights) or weights.ndim < 3:
            return
        product = self._products.get(_storage_id(scores)) if _can_be_traced(scores) else None
        if dim not in (-1, scores.ndim - 1):
            product = None
        storages = {_storage_id(weights): StorageWeakRef(weights.untyped_storage())}
        found = _Weights(product, None if product is None else scores.detach(), storages)
        self._pending = [*self._pending[1 - _NUM_PENDING :], found]

    def _pass_on(self, args: tuple[Any, ...], result: Any) -> None:
        """Trace the result of an operator on a traced tensor, if it has the same size."""
        if not _can_be_traced(result):
            return
        for given in args:
            if not _can_be_traced(given) or given.numel() != result.numel():
                continue
            place = _storage_id(given)
            if place in self._products:
                _, query_NTD, key_NDS = self._products[place]
                self._trace(result, query_NTD, key_NDS)
                return
            if (weights := self._weights_in(given)) is not None:
                drawn = weights.drawn
                if drawn is not None and _storage_id(drawn) in map(_storage_id, filter(_can_be_traced, args)):
                    weights.noise.append(drawn.expand_as(given))
                    weights.drawn = None
                weights.storages[_storage_id(result)] = StorageWeakRef(result.untyped_storage())
                return

    def _trace(self, result: Tensor, query_NTD: Tensor, key_NDS: Tensor) -> None:
        # Moved to the end, among the newest.
        self._products.pop(_storage_id(result), None)
        self._products[_storage_id(result)] = _Product(StorageWeakRef(result.untyped_storage()), query_NTD, key_NDS)


def _can_be_traced(x: Any) -> TypeGuard[Tensor]:
    """Return whether this is a floating-point tensor with its own storage."""
    if not isinstance(x, Tensor) or not is_plain(x) or not x.is_floating_point():
        return False
    return x.layout is torch.strided and not x.is_nested and x.device.type != "meta"


def _storage_id(x: Tensor) -> int:
    # PyTorch has no public way to test whether two tensors share a storage that may be empty.
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _as_call(weights: _Weights, left: Tensor, values_NSD: Tensor, result_NTD: Tensor) -> AttentionCall | str:
    """Return the call, or the reason why it is not attention; heads in the batch axis stay there."""
    if weights.product is None or weights.scores is None:
        return _OTHER_FORM
    (_, query_NTD, key_NDS), scores = weights.product, weights.scores
    num_products, (num_queries, num_keys) = len(left), scores.shape[-2:]
    shapes = (query_NTD.shape[:2], key_NDS.shape[::2], left.shape)
    expected = ((num_products, num_queries), (num_products, num_keys), (num_products, num_queries, num_keys))
    if shapes != expected or scores.numel() != left.numel():
        return _OTHER_FORM
    if not _are_weights(left.detach(), scores, weights.noise):
        return _CHANGED
    num_heads = scores.shape[-3] if scores.ndim > 3 else 1

    def by_heads(x: Tensor) -> Tensor:
        return x.detach().reshape(-1, num_heads, *x.shape[-2:])

    return AttentionCall(
        query=by_heads(query_NTD),
        key=by_heads(key_NDS.mT),
        value=by_heads(values_NSD),
        mask=by_heads(scores),
        causal=False,
        scale=None,
        output=by_heads(result_NTD),
        scored=True,
    )


def _are_weights(used_NTS: Tensor, all_scores: Tensor, all_noise: Sequence[Tensor]) -> bool:
    """Return whether `used_NTS` is the softmax of the scores times the factors of dropout, up to rounding.

    Queries that may see nothing are not compared: some models get nan or equal weights there and replace them.
    """
    tolerance = 8 * torch.finfo(used_NTS.dtype).eps
    num_keys = used_NTS.shape[-1]
    size = max(1, _NUM_COMPARED // max(1, num_keys))
    parts = (x.reshape(-1, num_keys).split(size) for x in (used_NTS, all_scores, *all_noise))
    for used, scores, *noise in zip(*parts, strict=True):
        scores = widen(scores)
        expected = scores.softmax(dim=-1)
        for each in noise:
            expected = expected * each
        empty = scores.amax(dim=-1, keepdim=True) <= FORBIDDEN
        same = (widen(used) - expected).abs() <= tolerance * (1 + expected.abs())
        if not bool((same | empty).all()):
            return False
    return True
