"""Recognise attention that a model spells out: a product of queries and keys, a softmax, a product with values.

Operators are followed below autograd. What a batched product gives is traced through operators that keep its size, such
as scales, biases, masks, casts and copies, by the storage that it lies in. If it reaches a softmax over its last axis,
and if what that gives is the first factor of a batched product over the same axis, then this is attention, and what
went into the softmax are its scores. Whatever is not certain is left alone: weights that are changed between softmax
and product are found by comparing all of them, with what dropout made of them if its operators were seen.

Legend: B batch, T query positions, S attended positions, H heads, D head width, N products of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tidegate.torch.kernel import is_plain
from tidegate.torch.precision import widen

_aten: Any = torch.ops.aten

_FACTORS = {_aten.bmm.default: slice(2), _aten.baddbmm.default: slice(1, 3)}
"""The batched products, and where their factors stand."""
_softmax = _aten._softmax.default
COMPOSITES = {_aten.matmul.default, _aten.einsum.default, _aten.softmax.int, _aten.dropout.default}
"""What reaches a mode whole in inference mode, and in these parts elsewhere."""

_draws = _aten.bernoulli_.float
_native_dropout = _aten.native_dropout.default
"""The parts of dropout: numbers that are drawn and multiplied with, or both at once."""

FORBIDDING = -1e4
"""What is added to a score to forbid it: the least number of a dtype, -1e9, -10,000; a score is never as low."""
FORBIDDEN = FORBIDDING / 2
"""What a score is at most that was forbidden so: whatever it was before, it is far below all others."""

_NUM_TRACED = 64
"""Products that are traced at a time; between scores and their softmax there are few."""
_NUM_COMPARED = 1 << 20
"""Weights that are compared at a time."""


class SpelledOutCall(NamedTuple):
    """An attention call, put together; heads that the model has in the batch are left there."""

    query: Tensor
    """(B, H, T, D)."""
    key: Tensor
    """(B, H, S, D)."""
    value: Tensor
    """(B, H, S, any width)."""
    scores: Tensor
    """(B, H, T, S): what went into the softmax."""
    output: Tensor
    """(B, H, T, any width)."""
    changed: bool
    """Whether something else than the softmax of the scores, up to dropout, met the values."""


class _Product(NamedTuple):
    """What may be scores, by their factors."""

    query_NTD: Tensor
    key_NDS: Tensor


class _Traced(NamedTuple):
    storage: StorageWeakRef
    """Held so that no other storage takes its address."""
    product: _Product


@dataclass(slots=True, eq=False)
class _Weights:
    """What a softmax gave, until it meets the values."""

    product: _Product
    scores: Tensor
    storages: dict[int, StorageWeakRef] = field(default_factory=dict)
    """Where the weights lie, and what was made of them."""
    noise: list[Tensor] = field(default_factory=list)
    """What dropout has multiplied them with."""


class SpelledOutAttention:
    """Follow the operators of one thread, and put attention calls together."""

    def __init__(self) -> None:
        self._products: dict[int, _Traced] = {}
        self._weights: _Weights | None = None
        self._drawn: Tensor | None = None
        """The noise of a dropout that has not been applied yet."""

    def follow(self, func: Any, args: tuple[Any, ...], result: Any) -> SpelledOutCall | None:
        """Take in an operator that was served; return the call that ends with it."""
        if func in _FACTORS:
            left, right = args[_FACTORS[func]]
            return self._follow_product(left, right, result)
        if func is _softmax:
            self._follow_softmax(args[0], args[1], result)
        elif func is _draws and self._weights is not None and _can_be_traced(result):
            # Memory for it was made like the weights, and is none of them.
            self._weights.storages.pop(_place(result), None)
            self._drawn = result.detach()
        elif func is _native_dropout:
            self._follow_dropout(args[0], args[1], *result)
        elif self._products or self._weights is not None:
            self._pass_on(args, result[0] if isinstance(result, tuple) and result else result)
        return None

    def _follow_product(self, left: Tensor, right: Tensor, result: Tensor) -> SpelledOutCall | None:
        found = self._weights
        if not (_can_be_traced(left) and _can_be_traced(right)):
            return None
        if found is not None and _place(left) in found.storages:
            self._weights = None
            return _as_call(found, left, right, result)
        # A product over one channel is no product of queries and keys: so rotary angles are made.
        if left.shape[-1] > 1:
            self._products = {
                place: traced
                for place, traced in list(self._products.items())[-_NUM_TRACED:]
                if not traced.storage.expired()
            }
            self._trace(result, _Product(left.detach(), right.detach()))
        return None

    def _follow_softmax(self, scores: Tensor, dim: int, weights: Tensor) -> None:
        traced = self._products.get(_place(scores)) if _can_be_traced(scores) else None
        if traced is None or dim not in (-1, scores.ndim - 1) or scores.ndim < 3:
            return
        self._weights = _Weights(traced.product, scores.detach())
        self._weights.storages[_place(weights)] = StorageWeakRef(weights.untyped_storage())

    def _follow_dropout(self, given: Tensor, probability: float, result: Tensor, kept: Tensor) -> None:
        weights = self._weights
        if weights is not None and _can_be_traced(given) and _place(given) in weights.storages and probability < 1:
            weights.noise.append(kept / (1 - probability))
        self._pass_on((given,), result)

    def _pass_on(self, args: tuple[Any, ...], result: Any) -> None:
        """Trace what an operator made of something that is traced, if it has its size."""
        if not _can_be_traced(result):
            return
        for given in args:
            if not _can_be_traced(given) or given.numel() != result.numel():
                continue
            place = _place(given)
            if place in self._products:
                self._trace(result, self._products[place].product)
                return
            if self._weights is not None and place in self._weights.storages:
                if self._drawn is not None and any(_lies_with(self._drawn, other) for other in args):
                    self._weights.noise.append(self._drawn.expand_as(given))
                    self._drawn = None
                self._weights.storages[_place(result)] = StorageWeakRef(result.untyped_storage())
                return

    def _trace(self, result: Tensor, product: _Product) -> None:
        # Put at the end, among the newest.
        self._products.pop(_place(result), None)
        self._products[_place(result)] = _Traced(StorageWeakRef(result.untyped_storage()), product)


def _can_be_traced(x: Any) -> TypeGuard[Tensor]:
    """Whether this is a tensor of numbers that lie in a storage of its own."""
    if not isinstance(x, Tensor) or not is_plain(x) or not x.is_floating_point():
        return False
    return x.layout is torch.strided and not x.is_nested and x.device.type != "meta"


def _place(x: Tensor) -> int:
    # PyTorch has no public way to ask whether two tensors share a storage that may be empty.
    return x.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def _lies_with(x: Tensor, other: Any) -> bool:
    return _can_be_traced(other) and _place(other) == _place(x)


def _as_call(found: _Weights, left: Tensor, values_NSD: Tensor, result_NTD: Tensor) -> SpelledOutCall | None:
    """The call, if the product's first factor has the shape of the weights."""
    product, scores = found.product, found.scores
    num_queries, num_keys = scores.shape[-2:]
    num_products = len(left)
    shapes = (product.query_NTD.shape[:2], product.key_NDS.shape[::2], left.shape)
    expected = ((num_products, num_queries), (num_products, num_keys), (num_products, num_queries, num_keys))
    if shapes != expected or scores.numel() != left.numel():
        return None
    num_heads = scores.shape[-3] if scores.ndim > 3 else 1

    def by_heads(x: Tensor) -> Tensor:
        return x.detach().reshape(-1, num_heads, *x.shape[-2:])

    return SpelledOutCall(
        query=by_heads(product.query_NTD),
        key=by_heads(product.key_NDS.mT),
        value=by_heads(values_NSD),
        scores=by_heads(scores),
        output=by_heads(result_NTD),
        changed=not _are_weights(found, left.detach()),
    )


def _are_weights(found: _Weights, used_NTS: Tensor) -> bool:
    """Whether what meets the values is the softmax of the scores times the noise of dropout, up to rounding.

    What a query has that may see nothing does not matter: some give nan or equal weights, and mend it afterwards.
    """
    tolerance = 8 * torch.finfo(used_NTS.dtype).eps
    num_keys = used_NTS.shape[-1]
    size = max(1, _NUM_COMPARED // max(1, num_keys))
    parts = (x.reshape(-1, num_keys).split(size) for x in (used_NTS, found.scores, *found.noise))
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
