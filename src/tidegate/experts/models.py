r"""Model one entry of one attention head as a regression function with its experts as parameters.

The query is at the last token $x$ of a sequence $x_1 \dots x_N$. With $q = B^\top x$ and
$a_j \propto \exp(q \cdot x_j)$,

$$f(x_1 \dots x_N) = \sum_c \sum_j a_j\; u_c \cdot x_j \times \text{gate},$$

where the placement determines what the gate multiplies. The experts are the vectors $u_c$, value times output
projection; the scaling between the two is never identified and not in the model.

Shapes: `b` fits at once, `M` design points, `N` tokens, `d` width, `k` experts, `P` parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from scipy.special import expit

from tidegate._validation import InputError, require_choice, require_sizes
from tidegate.experts.layers import Floats

Placement: TypeAlias = Literal["none", "query", "key", "dense", "g1", "g2", "bma", "bma-query"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
"""Placements of the gate: none; on the query, the key or the result; or on each expert, reading the input (`g1` at the
query token, `g2` at the key token) or the query (`bma-query` and `bma`)."""

_PER_EXPERT = ("g1", "g2", "bma", "bma-query")
_AT_SOURCE = ("g2", "bma")
_AT_DESTINATION = ("g1", "bma-query")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Design:
    """A uniform distribution over finitely many sequences."""

    points: Floats
    """(M, N, d)"""

    def __post_init__(self) -> None:
        if self.points.ndim != 3 or self.points.dtype != np.float64:
            expected = "an array (sequences, tokens, width) in float64"
            raise InputError("points", expected=expected, got=(self.points.shape, str(self.points.dtype)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertTruth:
    """The true parameters of the data."""

    scores: Floats
    """(d, d): B"""
    experts: Floats
    """(k, d): u"""
    gate: Floats
    """(k, d) for a gate of each expert, (d, d) for query and key, (d,) for dense, (0,) for none."""

    def vector(self) -> Floats:
        """Flatten all parameters into one vector (P,)."""
        return np.concatenate([np.ravel(part) for part in (self.scores, self.experts, self.gate)])


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertModel:
    """The regression function with k experts and a gate at one placement; P parameters in the order B, u, gate."""

    placement: Placement
    k: int
    width: int = 2

    def __post_init__(self) -> None:
        require_choice("placement", self.placement, PLACEMENTS)
        require_sizes(k=self.k, width=self.width)

    @property
    def gated_experts(self) -> bool:
        """Return whether each expert has its own gate."""
        return self.placement in _PER_EXPERT

    @property
    def gate_shape(self) -> tuple[int, ...]:
        """Return the shape of the gate's parameters."""
        match self.placement:
            case "none":
                return (0,)
            case "dense":
                return (self.width,)
            case "query" | "key":
                return (self.width, self.width)
            case _:
                return (self.k, self.width)

    @property
    def num_parameters(self) -> int:
        """Return P."""
        return self.width**2 + self.k * self.width + int(np.prod(self.gate_shape))

    @property
    def rank(self) -> int:
        """Return the number of identified directions at generic parameters; ungated experts count as their sum."""
        return self.num_parameters - (0 if self.gated_experts else (self.k - 1) * self.width)

    def split(self, parameters: Floats) -> tuple[Floats, Floats, Floats]:
        """Split parameters (..., P) into B (..., d, d), u (..., k, d) and those of the gate."""
        first, second = self.width**2, self.width**2 + self.k * self.width
        lead = parameters.shape[:-1]
        return (
            parameters[..., :first].reshape(*lead, self.width, self.width),
            parameters[..., first:second].reshape(*lead, self.k, self.width),
            parameters[..., second:].reshape(*lead, *self.gate_shape),
        )

    def value(self, parameters: Floats, design: Design) -> Floats:
        """Evaluate the function of every fit at every design point: (b, P) gives (b, M)."""
        return _Pass(self, parameters, design).value

    def value_and_jacobian(self, parameters: Floats, design: Design) -> tuple[Floats, Floats]:
        """Return the values (b, M) and their analytic derivatives (b, P, M)."""
        done = _Pass(self, parameters, design)
        return done.value, done.jacobian()


class _Pass:
    """One evaluation, with the intermediate values for its derivatives.

    The short axes of tokens, channels or experts precede (b, M), so that each operation runs over contiguous numbers.
    """

    def __init__(self, model: ExpertModel, parameters: Floats, design: Design) -> None:
        self.model = model
        self.tokens = np.ascontiguousarray(np.transpose(design.points, (1, 2, 0)))
        self.last = self.tokens[-1]
        self.B, self.u, self.gate = model.split(parameters)
        # A gate that reads the query reads the input through B times its matrix.
        reads_query = model.placement in ("bma", "bma-query")
        self.theta = self.gate @ np.swapaxes(self.B, -1, -2) if reads_query else self.gate
        self.query = _combine(np.swapaxes(self.B, -1, -2), self.last)
        self.weights = self._attend()
        self.leaves = self._gated_leaves()
        self.mixed = _dot(self.weights, self.leaves)
        self.value = self.mixed if model.placement != "dense" else self.outside * self.mixed

    def _attend(self) -> Floats:
        """Compute each token's weight, (N, b, M)."""
        facing, keys = self.query, self.tokens[:, :, None, :]
        if self.model.placement == "query":
            self.query_gate = expit(_combine(np.swapaxes(self.gate, -1, -2), self.last))
            facing = facing * self.query_gate
        if self.model.placement == "key":
            by_channel = np.swapaxes(self.gate, -1, -2)
            self.key_gate = expit(np.stack([_combine(by_channel, token) for token in self.tokens]))
            keys = keys * self.key_gate
        scores = np.stack([_dot(facing, key) for key in keys])
        weights = np.exp(scores - np.max(scores, axis=0))
        return weights / np.sum(weights, axis=0)

    def _gated_leaves(self) -> Floats:
        """Compute each token's contribution, (N, b, M)."""
        placement = self.model.placement
        if placement in _AT_SOURCE:
            self.source_gate = expit(np.stack([_combine(self.theta, token) for token in self.tokens]))
            self.source_experts = np.stack([_combine(self.u, token) for token in self.tokens])
            return np.stack([_dot(*pair) for pair in zip(self.source_gate, self.source_experts, strict=True)])
        if placement in _AT_DESTINATION:
            self.destination_gate = expit(_combine(self.theta, self.last))
            merged = _mix(self.u, self.destination_gate)
        else:
            merged = np.sum(self.u, axis=1).T[:, :, None]
        if placement == "dense":
            self.outside = expit(self.gate @ self.last)
        return np.stack([_dot(merged, token) for token in self.tokens])

    def jacobian(self) -> Floats:
        """Return the derivatives (b, P, M)."""
        pull = self.weights * (self.leaves - self.mixed)
        # The gradient of the query: the covariance of contributions and keys under the weights.
        to_query = _average(pull, self.tokens)
        match self.model.placement:
            case "none":
                parts = [self._by_scores(to_query), self._by_merged_experts()]
            case "dense":
                parts = [self.outside * self._by_scores(to_query), self.outside * self._by_merged_experts()]
                parts.append(self.outside * (1 - self.outside) * self.mixed * self.last[:, None, :])
            case "query":
                gate = self.query_gate
                by_gate = self._by_scores(to_query * self.query * gate * (1 - gate))
                parts = [self._by_scores(to_query * gate), self._by_merged_experts(), by_gate]
            case "key":
                parts = self._key_parts(pull)
            case _:
                parts = self._gated_parts(to_query)
        return np.ascontiguousarray(np.swapaxes(np.concatenate(parts), 0, 1))

    def _by_scores(self, to_query: Floats) -> Floats:
        product = self.last[:, None, None, :] * to_query
        return product.reshape(-1, *product.shape[2:])

    def _by_merged_experts(self) -> Floats:
        return np.tile(_average(self.weights, self.tokens), (self.model.k, 1, 1))

    def _key_parts(self, pull: Floats) -> list[Floats]:
        gated = pull[:, None] * self.tokens[:, :, None, :] * self.key_gate
        slope = gated * (1 - self.key_gate) * self.query
        by_gate = [_average(slope[:, column], self.tokens) for column in range(self.model.width)]
        by_gate = np.stack(by_gate, axis=1).reshape(-1, *pull.shape[1:])
        return [self._by_scores(np.sum(gated, axis=0)), self._by_merged_experts(), by_gate]

    def _gated_parts(self, to_query: Floats) -> list[Floats]:
        """Differentiate by scores, experts and gate, for placements with a gate per expert."""
        if self.model.placement in _AT_SOURCE:
            weighted = self.weights[:, None] * self.source_gate
            slope = weighted * (1 - self.source_gate) * self.source_experts
            by_experts = np.stack([_average(weighted[:, c], self.tokens) for c in range(self.model.k)])
            by_theta = np.stack([_average(slope[:, c], self.tokens) for c in range(self.model.k)])
        else:
            gate, averages = self.destination_gate, _average(self.weights, self.tokens)
            by_experts = gate[:, None] * averages
            own = np.stack([_dot(self.u[:, c].T[:, :, None], averages) for c in range(self.model.k)])
            by_theta = (gate * (1 - gate) * own)[:, None] * self.last[:, None, :]
        scores = self._by_scores(to_query)
        if self.theta is not self.gate:
            through = np.einsum("kpbm,bkq->pqbm", by_theta, self.gate)
            scores = scores + through.reshape(scores.shape)
            by_theta = np.stack([_mix(self.B, part) for part in by_theta])
        return [scores, by_experts.reshape(-1, *scores.shape[1:]), by_theta.reshape(-1, *scores.shape[1:])]


def _combine(matrices: Floats, vectors: Floats) -> Floats:
    """Apply each fit's matrix (b, m, d) to the design's vectors (d, M), giving (m, b, M)."""
    return np.swapaxes(matrices @ vectors, 0, 1)


def _mix(matrices: Floats, amounts: Floats) -> Floats:
    """Combine the rows of each fit's matrix (b, m, d) by weights (m, b, M), giving (d, b, M)."""
    rows = range(matrices.shape[1])
    return np.stack(
        [_dot([matrices[:, row, column, None] for row in rows], amounts) for column in range(matrices.shape[2])]
    )


def _average(weights: Floats, tokens: Floats) -> Floats:
    """Sum weights (N, b, M) times tokens (N, d, M) over tokens, giving (d, b, M)."""
    return np.stack([_dot(weights, tokens[:, column]) for column in range(tokens.shape[1])])


def _dot(a: Sequence[Floats] | Floats, b: Sequence[Floats] | Floats) -> Floats:
    """Sum products over the first axis."""
    pairs = iter(zip(a, b, strict=True))
    first, second = next(pairs)
    total = first * second
    for first, second in pairs:
        total += first * second
    return total


def default_design(*, num_points: int = 128, num_tokens: int = 4, width: int = 2, seed: int = 0) -> Design:
    """Draw sequences of normal tokens with standard deviation 1.5."""
    rng = np.random.default_rng(seed)
    return Design(points=1.5 * rng.standard_normal((num_points, num_tokens, width)))


def default_truth(placement: Placement) -> ExpertTruth:
    """Return two well-separated experts of width 2 with well-separated gates, the same for every placement."""
    gates = {
        "none": np.zeros(0),
        "dense": np.array([1.2, -0.8]),
        "query": np.array([[1.0, -0.5], [0.6, 0.9]]),
        "key": np.array([[1.0, -0.5], [0.6, 0.9]]),
    }
    return ExpertTruth(
        scores=np.array([[0.8, 0.3], [-0.4, 0.6]]),
        experts=np.array([[1.5, 0.5], [-0.6, 1.4]]),
        gate=gates.get(placement, np.array([[1.6, -1.0], [-0.8, -1.4]])),
    )
