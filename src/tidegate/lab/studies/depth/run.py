r"""Measure the growth of curvature with the number of layers, in a structured stack and at random initialization.

The structured stack repeats one layer. Its attention is uniform, because the keys are 0; its value and output maps
together rotate the residual stream by 90 degrees, a fixed share of which is added; its gates read through orthogonal
matrices. Without a gate it is affine at every depth. The random stack has freshly initialized layers. Both are
residual. Curvature is relative: K times the squared length of the output.

While the steps are small, the second fundamental forms of L equal layers add up, and K, which is quadratic in them,
grows as $L^2$. The exponent falls when the layers have rotated the stream so far that they no longer bend the same
directions. Growth is therefore reported from each depth to the next, not as a single power. A sigmoid near 1/2 halves
the branch that it multiplies, which flattens a random stack by itself. The control for this is the constant gate 1/2,
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
from tidegate.geometry import depth_chart
from tidegate.lab.studies.catalogue import QUESTIONS
from tidegate.lab.studies.curved_layers import FLAT, initialized_layer, relative_curvature, with_strength
from tidegate.lab.studies.intervals import SeedMean, format_interval, interval_panel
from tidegate.lab.studies.options import require_among, require_at_least, require_gates
from tidegate.lab.studies.study import Study
from tidegate.lab.training.events import Tell, ignore, report_parts
from tidegate.report.page import Column, Lines, Panel, Section, Series, Table
from tidegate.sizes import HeadShape
from tidegate.tensors.layer import AttentionArrays

Regime: TypeAlias = Literal["structured", "random"]
FloatArray: TypeAlias = NDArray[np.float64]
_TITLES: dict[Regime, str] = {"structured": "Structured stack", "random": "Random initialization"}
_TANGENTS = {"plane": "of slices", "full": "of the whole image"}


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthOptions:
    """Stacks, sizes and the number of repetitions."""

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
    """Share of the 90-degree rotation that a structured layer adds to the stream; a small share preserves lengths."""
    tangent: Literal["plane", "full"] = "plane"
    """`plane`: curvature of slices; `full`: of the whole image."""
    regimes: tuple[Regime, ...] = ("structured", "random")

    def __post_init__(self) -> None:
        require_gates(self.gates)
        # A line needs two depths, an interval two seeds.
        require_at_least(self, num_seeds=2, num_planes=1, length=2)
        require_among("regimes", self.regimes, get_args(Regime))
        if len(self.depths) < 2 or min(self.depths) < 1 or list(self.depths) != sorted(set(self.depths)):
            raise InputError("depths", expected="two or more numbers of layers, ascending", got=self.depths)


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """A linear fit of log curvature per seed, and the mean slope over seeds with its 95 % interval."""

    against: Literal["log depth", "depth"]
    """With `log depth` the slope is the exponent of a power law, with `depth` a rate per layer."""
    slope: float
    low: float
    high: float
    residual: float
    """Root mean square of the residuals, in nats."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthCurve:
    """The curvature of one gate in one regime, at all depths."""

    regime: Regime
    gate: str
    medians: tuple[tuple[float, ...], ...]
    """Median |K| over planes, seed by depth."""
    positive: tuple[float, ...]
    """Share of planes with positive curvature, by depth."""
    growth: tuple[Growth, ...]
    """Both fits; empty if all curvature is rounding error."""

    @property
    def flat(self) -> bool:
        """Return whether there is only rounding error at every depth."""
        return not self.growth

    @property
    def grows(self) -> bool:
        """Return whether the interval of the exponent of depth lies above 0."""
        return any(growth.low > 0 for growth in self.growth if growth.against == "log depth")

    @property
    def levels(self) -> tuple[float, ...]:
        """Return the geometric mean over seeds at each depth."""
        return tuple(np.exp(np.log(np.array(self.medians)).mean(axis=0)).tolist())

    def local_exponents(self, depths: Sequence[int]) -> tuple[SeedMean, ...]:
        """Return the exponent of |K| between each depth and the next: constant if |K| is a power of depth."""
        slopes = np.diff(np.log(np.array(self.medians)), axis=1) / np.diff(np.log(depths))
        return tuple(SeedMean.of(column.tolist()) for column in slopes.T)


@dataclass(frozen=True, kw_only=True, slots=True)
class DepthResult:
    """The curves of every gate in every regime."""

    options: DepthOptions
    curves: tuple[DepthCurve, ...]


def run_depth(options: DepthOptions, *, tell: Tell = ignore) -> DepthResult:
    """Measure the curvature of stacks of every depth."""
    cases: list[tuple[Regime, str]] = [(regime, gate) for regime in options.regimes for gate in options.gates]
    parts = report_parts(cases, tell, work="depth", describe=", ".join)
    return DepthResult(options=options, curves=tuple(_curve(regime, gate, options) for regime, gate in parts))


def structured_stack(gate: str, depth: int, x: torch.Tensor, options: DepthOptions, seed: int) -> list[AttentionArrays]:
    """Return one layer `depth` times, with gates of the chosen strength over x."""
    rng = np.random.default_rng(seed)
    shape = HeadShape.of(d_model=options.d_model, num_heads=options.num_heads)
    frame = _orthogonal(rng, shape.d_model)
    quarter = frame @ np.kron(np.eye(shape.d_model // 2), [[0.0, -1.0], [1.0, 0.0]]) @ frame.T
    # One matrix per head, (H, d, h).
    inward = torch.from_numpy(frame).unflatten(1, (shape.num_heads, shape.head_dim)).transpose(0, 1).contiguous()
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
    """Return freshly initialized layers, each with gates of the chosen strength over x."""
    torch.manual_seed(seed)
    return [initialized_layer(gate, x, options.strength, num_heads=options.num_heads) for _ in range(depth)]


def fit_growth(depths: Sequence[int], medians: FloatArray, against: Literal["log depth", "depth"]) -> Growth:
    """Fit a line to the log medians (seed, depth) of each seed; needs two seeds and positive medians."""
    at = np.log(depths) if against == "log depth" else np.asarray(depths, dtype=np.float64)
    centered = at - at.mean()
    logs = np.log(medians)
    slopes = logs @ centered / (centered @ centered)
    left = logs - logs.mean(axis=1, keepdims=True) - slopes[:, None] * centered
    mean = SeedMean.of(slopes.tolist())
    residual = math.sqrt(float((left**2).mean()))
    return Growth(against=against, slope=float(slopes.mean()), low=mean.low, high=mean.high, residual=residual)


def finding(result: DepthResult) -> str:
    """State the result in sentences."""
    depths, parts = result.options.depths, list[str]()
    for regime in result.options.regimes:
        curves = [curve for curve in result.curves if curve.regime == regime]
        flat = [curve.gate for curve in curves if curve.flat]
        bent = [curve for curve in curves if not curve.flat]
        parts.append(f"{_TITLES[regime]}:")
        if flat:
            parts.append(f"{', '.join(flat)} stays flat at every depth.")
        if bent:
            exponents = "; ".join(f"{curve.gate} {_list_exponents(curve, depths)}" for curve in bent)
            levels = ", ".join(f"{curve.gate} {curve.levels[-1]:.2g}" for curve in bent)
            parts.append(
                f"Local exponents of median |K| from each depth to the next ({', '.join(map(str, depths))} layers): "
                f"{exponents}. At {depths[-1]} layers |K| is {levels}."
            )
    still = [f"{curve.gate} ({curve.regime})" for curve in result.curves if not curve.flat and not curve.grows]
    parts.append(
        f"No significant growth for {', '.join(still)}."
        if still
        else "Curvature above rounding error grows with depth in all cases (95 % intervals over seeds above 0)."
    )
    return " ".join(parts)


def _list_exponents(curve: DepthCurve, depths: Sequence[int]) -> str:
    """List the exponents in order, the first and the last with their intervals."""
    exponents = curve.local_exponents(depths)
    words = [f"{each.value:.2f}" for each in exponents]
    for end in (0, -1):
        words[end] = format_interval(exponents[end], ".2f")
    return ", ".join(words)


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
    """Measure relative curvatures (depth, plane) of one seed; shallow stacks are the first layers of the deepest."""
    rng = np.random.default_rng(1000 + seed)
    x = torch.from_numpy(rng.standard_normal((options.length, options.d_model)))
    build = structured_stack if regime == "structured" else random_stack
    stack = build(gate, max(options.depths), x, options, seed)
    u, v = rng.standard_normal((2, options.num_planes, options.d_model))
    charts = (depth_chart(stack[:depth], x, moving=1) for depth in options.depths)
    return np.stack([relative_curvature(chart, u, v, tangent=options.tangent) for chart in charts])


def _orthogonal(rng: np.random.Generator, size: int) -> FloatArray:
    return np.linalg.qr(rng.standard_normal((size, size)))[0]


def view(result: DepthResult) -> tuple[Section, ...]:
    """Return the curves, exponents and table of each regime."""
    return tuple(
        Section(
            title=_TITLES[regime],
            lead=f"Medians of the absolute relative curvature {_TANGENTS[result.options.tangent]}. Bold lines are "
            "geometric means over seeds.",
            panels=_panels(result, [curve for curve in result.curves if curve.regime == regime]),
        )
        for regime in result.options.regimes
    )


def _panels(result: DepthResult, curves: list[DepthCurve]) -> tuple[Panel, ...]:
    bent = [curve for curve in curves if not curve.flat]
    depths = tuple(float(depth) for depth in result.options.depths)
    series: list[Series] = []
    for curve in bent:
        series += [Series(label=curve.gate, group=curve.gate, x=depths, y=row, faint=True) for row in curve.medians]
        series.append(Series(label=curve.gate, group=curve.gate, x=depths, y=curve.levels))
    return (
        Lines(
            title="Curvature against the number of layers",
            alternative="Median |K| by depth, one color per gate and one thin line per seed.",
            x_label="layers",
            y_label="median |K|, relative",
            series=tuple(series),
            log_x=True,
            log_y=True,
        ),
        interval_panel(
            "Local exponents of |K| in depth L, which are equal under a power law",
            "exponent, 95 % intervals over seeds",
            {
                f"{curve.gate}, {shallow} to {deep}": each
                for curve in bent
                for (shallow, deep), each in zip(
                    pairwise(result.options.depths), curve.local_exponents(result.options.depths), strict=True
                )
            },
            form=".2f",
        ),
        _table(result, curves),
    )


def _table(result: DepthResult, curves: list[DepthCurve]) -> Table:
    fits = ("exponent of L", "low", "high", "residual (nats)", "rate per layer", "low", "high", "residual (nats)")
    columns = (
        Column(title="gate"),
        *(Column(title=f"|K|, L = {depth}", digits=4) for depth in result.options.depths),
        *(Column(title=f"positive, L = {depth}", digits=2) for depth in result.options.depths),
        *(Column(title=name, digits=3) for name in fits),
    )
    rows = tuple(
        (
            curve.gate,
            *np.median(np.array(curve.medians), axis=0).tolist(),
            *curve.positive,
            *(number for growth in curve.growth for number in (growth.slope, growth.low, growth.high, growth.residual)),
            *(None for _ in range(0 if curve.growth else len(fits))),
        )
        for curve in curves
    )
    return Table(title="By gate", columns=columns, rows=rows, note="No fit: flat to rounding error.")


STUDY = Study(
    name="depth",
    question=QUESTIONS["depth"],
    claim="arXiv 2604.14702 claims that curvature grows systematically with depth in a structured regime. The "
    "structured stack is our own construction, and the curvature is that of slices unless tangent=full.",
    options=DepthOptions(),
    result=DepthResult,
    run=run_depth,
    finding=finding,
    view=view,
)
