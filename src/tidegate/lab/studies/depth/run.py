r"""Does curvature grow with the number of layers? In a structured stack, where gates alone can bend, and at random.

The structured stack is one layer over and over: attention is uniform, since the keys are 0, the value and output maps
together turn the stream by a quarter turn of which a fixed share is added, and gates read through orthogonal matrices.
Without a gate it is affine at every depth. The random stack has layers as they are initialised. Both add their outputs
to the stream. Curvature is relative, K times the squared length of the output.

While the steps are small, the second fundamental forms of L equal layers add up, and K, which is quadratic in them,
grows as $L^2$. The exponent falls when layers have turned the stream so far that they no longer bend the same
directions. So growth is given from each depth to the next, and not as one power. A sigmoid about 1/2 halves the branch
that it acts on, which flattens a random stack by itself: the control for that is the constant 1/2, spelled
`output:input:constant`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray

from tidegate._validation import InputError
from tidegate.gate import GatePath
from tidegate.gates import Gates
from tidegate.geometry import depth_chart, sectional_curvature
from tidegate.lab.judging import t_interval
from tidegate.lab.studies.curved_layers import FLAT, with_strength
from tidegate.lab.studies.options import require_among, require_at_least, require_gates
from tidegate.lab.training.events import Tell, ignore, report_parts
from tidegate.sizes import HeadShape
from tidegate.tensors.layer import AttentionArrays
from tidegate.torch import GatedAttention

Regime: TypeAlias = Literal["structured", "random"]
FloatArray: TypeAlias = NDArray[np.float64]
WHERE: dict[Regime, str] = {"structured": "Structured stack", "random": "Random initialisation"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthOptions:
    """What is measured, and how often."""

    gates: tuple[str, ...] = ("none", "bma", "bma-query", "g1", "output:output")
    depths: tuple[int, ...] = (1, 2, 4, 8, 16)
    num_seeds: int = 10
    num_planes: int = 16
    d_model: int = 12
    num_heads: int = 2
    length: int = 6
    strength: float = 1.0
    """Standard deviation of the gates' logits over the first input."""
    step: float = 0.25
    """Share of the quarter turn that a structured layer adds to the stream; a small one keeps lengths as they are."""
    tangent: Literal["plane", "full"] = "plane"
    """Curvature of slices, or of the whole image."""
    regimes: tuple[Regime, ...] = ("structured", "random")

    def __post_init__(self) -> None:
        require_gates(self.gates)
        # A line through depths needs two of them, and an interval two seeds.
        require_at_least(self, num_seeds=2, num_planes=1, length=2)
        require_among("regimes", self.regimes, get_args(Regime))
        if len(self.depths) < 2 or min(self.depths) < 1 or list(self.depths) != sorted(set(self.depths)):
            raise InputError("depths", expected="two or more numbers of layers, ascending", got=self.depths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """A straight line through log curvature for each seed, and the mean slope over seeds with its 95 % interval."""

    against: Literal["log depth", "depth"]
    """`log depth` makes the slope the exponent of a power of depth; `depth` makes it a rate for each layer."""
    slope: float
    low: float
    high: float
    residual: float
    """Root mean square of the residuals, in nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exponent:
    """What power of depth |K| grows by between two depths: the mean over seeds with its 95 % interval."""

    shallow: int
    deep: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthCurve:
    """One gate in one regime, over all depths."""

    regime: Regime
    gate: str
    medians: tuple[tuple[float, ...], ...]
    """Of |K| over planes: seed by depth."""
    positive: tuple[float, ...]
    """Share of planes with positive curvature, by depth."""
    growth: tuple[Growth, ...]
    """Both fits; empty if all curvature is rounding."""

    @property
    def flat(self) -> bool:
        """Whether all curvature is rounding, at every depth."""
        return not self.growth

    @property
    def grows(self) -> bool:
        """Whether the interval of the power of depth lies above 0."""
        return any(growth.low > 0 for growth in self.growth if growth.against == "log depth")

    @property
    def levels(self) -> tuple[float, ...]:
        """Geometric mean over seeds, by depth."""
        return tuple(np.exp(np.log(np.array(self.medians)).mean(axis=0)).tolist())

    def local_exponents(self, depths: Sequence[int]) -> tuple[Exponent, ...]:
        """Return the exponents between each depth and the next: constant if |K| is a power of depth."""
        slopes = np.diff(np.log(np.array(self.medians)), axis=1) / np.diff(np.log(depths))
        ends = [t_interval(column.tolist()) for column in slopes.T]
        return tuple(
            Exponent(shallow=shallow, deep=deep, value=float(column.mean()), low=low, high=high)
            for (shallow, deep), column, (low, high) in zip(pairwise(depths), slopes.T, ends, strict=True)
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthResult:
    """Every gate in both regimes."""

    options: DepthOptions
    curves: tuple[DepthCurve, ...]


def run_depth(options: DepthOptions, *, tell: Tell = ignore) -> DepthResult:
    """Measure stacks of every depth."""
    cases: list[tuple[Regime, str]] = [(regime, gate) for regime in options.regimes for gate in options.gates]
    parts = report_parts(cases, tell, work="depth", describe=", ".join)
    return DepthResult(options=options, curves=tuple(_curve(regime, gate, options) for regime, gate in parts))


def structured_stack(gate: str, depth: int, x: torch.Tensor, options: DepthOptions, seed: int) -> list[AttentionArrays]:
    """Return the same layer `depth` times, with gates at the options' strength over x."""
    rng = np.random.default_rng(seed)
    shape = HeadShape.of(d_model=options.d_model, num_heads=options.num_heads)
    frame = _orthogonal(rng, shape.d_model)
    quarter = frame @ np.kron(np.eye(shape.d_model // 2), [[0.0, -1.0], [1.0, 0.0]]) @ frame.T
    inward = _split_heads(frame, shape)
    gates = Gates.parse(gate)
    parameters: dict[GatePath, dict[str, torch.Tensor]] = {}
    for one in gates:
        shapes = one.parameter_shapes(**asdict(shape))
        parameters[one.path] = {name: torch.zeros(size, dtype=torch.float64) for name, size in shapes.items()}
        if "weight" in shapes:
            heads, read, gated = shapes["weight"]
            matrices = [_orthogonal(rng, max(read, gated))[:read, :gated] for _ in range(heads)]
            parameters[one.path]["weight"] = torch.from_numpy(np.stack(matrices))
    layer = AttentionArrays(
        W_Q=inward,
        W_K=torch.zeros_like(inward),
        W_V=inward,
        W_O=torch.from_numpy(options.step * frame.T @ quarter).unflatten(0, (shape.num_heads, shape.head_dim)),
        gates=gates,
        gate_parameters=parameters,
    )
    return [with_strength(layer, x, options.strength)] * depth


def random_stack(gate: str, depth: int, x: torch.Tensor, options: DepthOptions, seed: int) -> list[AttentionArrays]:
    """Return layers as they are initialised, each with gates at the options' strength over x."""
    torch.manual_seed(seed)
    layers: list[AttentionArrays] = []
    for _ in range(depth):
        layer = GatedAttention(options.d_model, options.num_heads, gate=gate, dtype=torch.float64).arrays()
        detached = layer.with_parameters({name: array.detach() for name, array in layer.parameters().items()})
        layers.append(with_strength(detached, x, options.strength))
    return layers


def fit_growth(depths: Sequence[int], medians: FloatArray, against: Literal["log depth", "depth"]) -> Growth:
    """Fit log medians (seed, depth) by a line for each seed; at least two seeds and positive numbers."""
    at = np.log(depths) if against == "log depth" else np.asarray(depths, dtype=np.float64)
    centred = at - at.mean()
    logs = np.log(medians)
    slopes = logs @ centred / (centred @ centred)
    left = logs - logs.mean(axis=1, keepdims=True) - slopes[:, None] * centred
    low, high = t_interval(slopes.tolist())
    return Growth(
        against=against,
        slope=float(slopes.mean()),
        low=low,
        high=high,
        residual=math.sqrt(float((left**2).mean())),
    )


def finding(result: DepthResult) -> str:
    """Say what holds, from the numbers."""
    depths, parts = result.options.depths, list[str]()
    for regime in result.options.regimes:
        curves = [curve for curve in result.curves if curve.regime == regime]
        flat = [curve.gate for curve in curves if curve.flat]
        bent = [curve for curve in curves if not curve.flat]
        parts.append(f"{WHERE[regime]}:")
        if flat:
            parts.append(f"{', '.join(flat)} stays flat at every depth.")
        if bent:
            exponents = "; ".join(f"{curve.gate} {_in_words(curve, depths)}" for curve in bent)
            levels = ", ".join(f"{curve.gate} {curve.levels[-1]:.2g}" for curve in bent)
            parts.append(
                f"Local exponents of median |K| from each depth to the next ({', '.join(map(str, depths))} layers): "
                f"{exponents}. At {depths[-1]} layers |K| is {levels}."
            )
    still = [f"{curve.gate} ({curve.regime})" for curve in result.curves if not curve.flat and not curve.grows]
    parts.append(
        f"No growth is shown for {', '.join(still)}."
        if still
        else "What bends grows, 95 % intervals over seeds above 0."
    )
    return " ".join(parts)


def _in_words(curve: DepthCurve, depths: Sequence[int]) -> str:
    """Exponents in turn; the first and the last with their intervals."""
    exponents = curve.local_exponents(depths)
    ends = {exponents[0], exponents[-1]}
    return ", ".join(
        f"{each.value:.2f} ({each.low:.2f} … {each.high:.2f})" if each in ends else f"{each.value:.2f}"
        for each in exponents
    )


def _curve(regime: Regime, gate: str, options: DepthOptions) -> DepthCurve:
    found = np.stack([_seed_curvatures(regime, gate, options, seed) for seed in range(options.num_seeds)])
    medians = np.median(np.abs(found), axis=-1)
    bent = bool((medians > FLAT).all())
    return DepthCurve(
        regime=regime,
        gate=gate,
        medians=tuple(map(tuple, medians.tolist())),
        positive=tuple((found > FLAT).mean(axis=(0, 2)).tolist()),
        growth=tuple(fit_growth(options.depths, medians, against) for against in ("log depth", "depth"))
        if bent
        else (),
    )


def _seed_curvatures(regime: Regime, gate: str, options: DepthOptions, seed: int) -> FloatArray:
    """Measure relative curvatures (depth, plane) of one seed; shallow stacks begin the deepest."""
    rng = np.random.default_rng(1000 + seed)
    x = torch.from_numpy(rng.standard_normal((options.length, options.d_model)))
    build = structured_stack if regime == "structured" else random_stack
    stack = build(gate, max(options.depths), x, options, seed)
    u, v = rng.standard_normal((2, options.num_planes, options.d_model))
    rows: list[FloatArray] = []
    for depth in options.depths:
        chart = depth_chart(stack[:depth], x, moving=1)
        size = float((chart(chart.start) ** 2).sum())
        rows.append(sectional_curvature(chart, chart.start, u, v, covariance=size, tangent=options.tangent).numpy())
    return np.stack(rows)


def _orthogonal(rng: np.random.Generator, size: int) -> FloatArray:
    return np.linalg.qr(rng.standard_normal((size, size)))[0]


def _split_heads(matrix: FloatArray, shape: HeadShape) -> torch.Tensor:
    """Split (d, H h) into one matrix per head, (H, d, h)."""
    return torch.from_numpy(matrix).unflatten(1, (shape.num_heads, shape.head_dim)).transpose(0, 1).contiguous()
