"""The gate vocabulary: what a gate multiplies, what it reads, and how many parameters it has.

Every part of the library (layers, parameter counts, decompositions, reports, the command line) uses these definitions.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal, TypeAlias, get_args

from tidegate._json import decode, parse_json
from tidegate._text import short_repr
from tidegate._validation import InputError, require_size
from tidegate.sizes import HeadShape

Site: TypeAlias = Literal["output", "value", "key", "query", "dense"]
Reads: TypeAlias = Literal["input", "query", "value", "output", "partition", "nothing"]
Grain: TypeAlias = Literal["element", "head"]
Share: TypeAlias = Literal["head", "group", "layer"]
Activation: TypeAlias = Literal["sigmoid", "silu", "softplus", "tanh1", "twosigmoid", "identity", "gelu", "tanh"]
Op: TypeAlias = Literal["multiply", "add", "replace"]
Placebo: TypeAlias = Literal["constant", "shuffled"]

GatePath: TypeAlias = Literal["query", "key", "value", "partition", "output", "dense"]

GATE_PATHS: tuple[GatePath, ...] = get_args(GatePath)
"""The paths of gates in a layer, in the order in which it applies them: the canonical order of several gates."""

_DEFAULT_INIT_STD = 0.02
_SOURCE_SITES: tuple[Site, ...] = ("key", "value")
_CHOICES: dict[str, tuple[str, ...]] = {
    "site": get_args(Site),
    "reads": get_args(Reads),
    "grain": get_args(Grain),
    "share": get_args(Share),
    "activation": get_args(Activation),
    "op": get_args(Op),
    "placebo": get_args(Placebo),
}
_ZERO_AT_ZERO: tuple[Activation, ...] = ("silu", "identity", "gelu", "tanh")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """A gate: `target op activation(reads W + b)`, at one site of an attention layer."""

    site: Site = "output"
    """The target: a head's attention output, its value, key or query, or the output projection's result."""
    reads: Reads = "input"
    """The input: the layer's input, the head's own query, the value, the attention output, nothing (a trained
    constant), or the logarithm of the head's partition function, with weight 1: that gate is a sink in the softmax's
    denominator."""
    grain: Grain = "element"
    """One value per feature, or one per head."""
    share: Share = "head"
    """One matrix per head, per key/value group, or for all heads."""
    activation: Activation = "sigmoid"
    """`tanh1` is 1 + tanh and `twosigmoid` is 2 sigmoid: both are exactly 1 at zero."""
    op: Op = "multiply"
    """How the gate acts on its target; `replace` applies the activation to the target itself, without a matrix: a
    pointwise function instead of a gate."""
    rank: int | None = None
    """Rank of the gate's matrix, stored as two factors; None for a full matrix."""
    width: int | None = None
    """Read only the first `width` channels; None reads all."""
    init_std: float = _DEFAULT_INIT_STD
    """Standard deviation of the initial matrix."""
    bias: float | None = None
    """Initial value of a trainable bias, which sets how open the gate starts; None for no bias, and 0 for a gate that
    reads nothing."""
    placebo: Placebo | None = None
    """A control that lacks only the mechanism of the gate. `constant` stays at the initial value; for the partition
    function it uses the logarithm of the number of visible keys. `shuffled` reads the same position of the next
    sequence in the batch, without a gradient to it. None is the gate itself."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices and not (name == "placebo" and value is None):
                hint = _suggest(str(value), choices)
                raise InputError(f"Gate.{name}", expected=f"a known {name}", got=value, hint=hint)
        for name in ("rank", "width"):
            require_size(f"Gate.{name}", getattr(self, name), optional=True)
        object.__setattr__(self, "init_std", _finite("init_std", self.init_std))
        if self.init_std < 0:
            raise InputError("Gate.init_std", expected="0 or above", got=self.init_std)
        if self.bias is not None:
            object.__setattr__(self, "bias", _finite("bias", self.bias))
        elif self.reads == "nothing":
            object.__setattr__(self, "bias", 0.0)
        _check_site(self)
        _check_matrix(self)
        _check_placebo(self)

    @property
    def path(self) -> GatePath:
        """Return the name of its parameters in a layer: its site, or `partition` for the gate that reads that."""
        return "partition" if self.reads == "partition" else self.site

    @property
    def has_matrix(self) -> bool:
        """Return whether it multiplies its input by a matrix."""
        return self.reads not in ("partition", "nothing") and self.op != "replace" and self.placebo != "constant"

    @property
    def has_bias(self) -> bool:
        """Return whether it learns a bias; a constant placebo keeps the initial value."""
        return self.bias is not None and self.placebo != "constant"

    @property
    def is_input_independent(self) -> bool:
        """Return whether its values are the same at every position of every sequence."""
        return self.reads == "nothing" or (self.placebo == "constant" and self.reads != "partition")

    @property
    def starting_value(self) -> float | None:
        """Return the factor or summand at initialization, except for the noise of its matrix.

        None for a sink, whose value depends on the number of keys, and for the op `replace`.
        """
        if self.reads == "partition" or self.op == "replace":
            return None
        return _START[self.activation](self.bias or 0.0)

    @property
    def is_identity(self) -> bool:
        """Return whether it always multiplies by exactly 1, as the constant placebo of a gate from 1."""
        return self.placebo == "constant" and self.op == "multiply" and self.starting_value == 1

    @property
    def is_undone_by_norm(self) -> bool:
        """Return whether it multiplies whole queries or keys by a positive number, which their norm cancels."""
        positive = self.activation in ("sigmoid", "softplus", "tanh1", "twosigmoid")
        is_one_factor = self.op == "multiply" and (self.grain == "head" or self.placebo == "constant")
        return self.site in ("query", "key") and is_one_factor and positive

    @property
    def on_source(self) -> bool:
        """Return whether it acts on the attended position (key and value sites), before the cache."""
        return self.site in _SOURCE_SITES

    @property
    def needs_self_attention(self) -> bool:
        """Return whether it reads, at the position where it acts, something that only self-attention has there."""
        if self.is_input_independent:
            return False
        return self.reads == "query" if self.on_source else self.reads == "value"

    def require_cross_attention(self) -> None:
        """Raise InputError if the gate cannot be used in cross-attention."""
        if self.needs_self_attention:
            expected = f"one that does not read the {self.reads} at the gated position, with a context"
            hint = "Only self-attention has it there. Use a gate such as 'bma-query' or 'g1'."
            raise InputError("gate", expected=expected, got=str(self), hint=hint)

    def require_other_sequences(self, num_sequences: int, *, cached: bool = False) -> None:
        """Raise InputError if the gate reads the next sequence of the batch where there is none, or with a cache."""
        if self.placebo != "shuffled":
            return
        if cached:
            expected = f"None with the gate {self}, which reads the next sequence of the batch"
            raise InputError("cache", expected=expected, hint="Read the whole batch at once, without a cache.")
        if num_sequences < 2:
            expected = f"of a batch size of at least 2 with the gate {self}, which reads the next sequence"
            raise InputError("x", expected=expected, got=num_sequences)

    @property
    def spelling(self) -> str:
        """Return the full spelling: `site:reads` and all options that differ from the defaults."""
        parts: list[str] = [self.site, self.reads]
        if self.grain != "element":
            parts.append(self.grain)
        if self.activation != "sigmoid":
            parts.append(self.activation)
        if self.share != "head":
            parts.append(f"shared-{self.share}")
        if self.op != "multiply":
            parts.append(self.op)
        if self.rank is not None:
            parts.append(f"r{self.rank}")
        if self.width is not None:
            parts.append(f"w{self.width}")
        if self.bias is not None and (self.reads, self.bias) != ("nothing", 0.0):
            parts.append(f"b{_spell_number(self.bias)}")
        if self.init_std != _DEFAULT_INIT_STD:
            parts.append(f"s{_spell_number(self.init_std)}")
        if self.placebo is not None:
            parts.append(self.placebo)
        return ":".join(parts)

    def __str__(self) -> str:
        """Return the preset's name if there is one, or the full spelling; `Gate.parse` reads both."""
        return _PRESET_NAMES.get(self) or self.spelling

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Parse a preset's name or a spelling such as `output:input:head:silu`."""
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"gate must be a string like 'bma' or 'value:query', got {short_repr(text)}.")
        text = text.strip()
        if text in PRESETS:
            return PRESETS[text]
        site, *parts = text.split(":")
        if text == "none" or "+" in text:
            expected, hint = "one gate", "Use Gates.parse for no gate or several."
        elif "," in text:
            expected, hint = "joined by '+'", f"Write {short_repr('+'.join(part.strip() for part in text.split(',')))}."
        elif not parts:
            expected, hint = "a preset or site:reads", _suggest(text, ("none", *PRESETS))
        elif site in PRESETS:
            expected, hint = "a preset alone or site:reads", f"Write {PRESETS[site].spelling} in place of {site}."
        else:
            return cls(**_parse_parts(site, *parts))
        raise InputError("gate", expected=expected, got=text, hint=hint)

    def to_json(self) -> str:
        """Return all fields as a JSON object for `Gate.from_json`."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Gate:
        """Parse the result of `to_json`; missing fields take their defaults. Raise InputError for unknown ones."""
        return decode(cls, parse_json(text))

    def num_heads_at_site(self, shape: HeadShape) -> int:
        """Return the number of heads of the gated tensor; 1 at the dense site, which has no heads."""
        if self.site == "dense":
            return 1
        return shape.num_kv_heads if self.on_source else shape.num_heads

    def num_matrices(self, shape: HeadShape) -> int:
        """Return the number of matrices that the heads at the site share."""
        match self.share:
            case "head":
                return self.num_heads_at_site(shape)
            case "group":
                return shape.num_kv_heads
            case "layer":
                return 1

    def read_width(self, shape: HeadShape) -> int:
        """Return the number of channels that one gate reads."""
        full = self._full_read_width(shape)
        if self.width is not None and self.width > full:
            expected = f"at most {full}, the channels that {self.site}:{self.reads} reads"
            raise InputError("Gate.width", expected=expected, got=self.width)
        return full if self.width is None else self.width

    def gated_width(self, shape: HeadShape) -> int:
        """Return the number of values of one gate at one position; a constant has one for all features."""
        if self.grain == "head" or self.placebo == "constant":
            return 1
        return shape.d_model if self.site == "dense" else shape.head_dim

    def parameter_shapes(
        self, *, d_model: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None
    ) -> dict[str, tuple[int, ...]]:
        """Return the shape of each parameter by name, heads first.

        `weight` is `(matrices, read width, gated width)`; with a rank r it is the product of `weight_down`,
        `(matrices, read width, r)`, and `weight_up`, `(matrices, r, gated width)`. `bias` is `(matrices, gated width)`.
        A gate that reads the partition function or nothing has no matrix, and a bias at most; a constant placebo and
        the op `replace` have no parameters.
        """
        shape = HeadShape.of(d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
        matrices, read, gated = self.num_matrices(shape), self.read_width(shape), self.gated_width(shape)
        shapes: dict[str, tuple[int, ...]]
        if not self.has_matrix:
            shapes = {}
        elif self.rank is None:
            shapes = {"weight": (matrices, read, gated)}
        else:
            shapes = {"weight_down": (matrices, read, self.rank), "weight_up": (matrices, self.rank, gated)}
        if self.has_bias:
            shapes["bias"] = (matrices, gated)
        return shapes

    def num_parameters(
        self, *, d_model: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None
    ) -> int:
        """Return the number of parameters that the gate adds to a layer."""
        shapes = self.parameter_shapes(
            d_model=d_model, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim
        )
        return sum(math.prod(shape) for shape in shapes.values())

    def _full_read_width(self, shape: HeadShape) -> int:
        match self.reads:
            case "input":
                return shape.d_model
            case "query":
                return shape.head_dim * (shape.group_size if self.on_source else 1)
            case "value":
                return shape.head_dim
            case "output":
                return shape.head_dim * (shape.num_heads if self.site == "dense" else 1)
            case "partition":
                return 1
            case "nothing":
                return 0


def _sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))


_START: dict[Activation, Callable[[float], float]] = {
    "sigmoid": _sigmoid,
    "silu": lambda z: z * _sigmoid(z),
    "softplus": lambda z: max(z, 0.0) + math.log1p(math.exp(-abs(z))),
    "tanh1": lambda z: 1 + math.tanh(z),
    "twosigmoid": lambda z: 2 * _sigmoid(z),
    "identity": lambda z: z,
    "gelu": lambda z: z * (1 + math.erf(z * math.sqrt(0.5))) / 2,
    "tanh": math.tanh,
}


def _require(gate: Gate, where: str, hint: str = "", **choices: tuple[object, ...]) -> None:
    """Raise InputError for the first field whose value is not allowed."""
    for name, allowed in choices.items():
        if (value := getattr(gate, name)) not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise InputError(f"Gate.{name}", expected=f"{expected} {where}", got=value, hint=hint)


def _check_site(gate: Gate) -> None:
    """Raise InputError if the gate's input does not exist at its site."""
    if gate.site == "dense":
        hint = "After the output projection there are no heads to read, gate or share matrices."
        _require(
            gate, "at the dense site", hint, reads=("input", "output", "nothing"), grain=("element",), share=("head",)
        )
    elif gate.reads == "partition":
        hint = "A head has one partition function. Use 'sink', which learns a logit, or 'off-by-one', whose logit is 0."
        where = "for a gate that reads the partition function"
        _require(gate, where, hint, site=("output",), grain=("head",), share=("head",))
        _require(gate, where, "Only sigmoid(log Z + b) is a sink.", activation=("sigmoid",), op=("multiply",))
    elif gate.reads == "output":
        hint = f"The attention output comes from the {gate.site}. Use {gate.site}:input or output:output."
        _require(gate, "for a gate that reads the attention output", hint, site=("output",))


def _check_matrix(gate: Gate) -> None:
    """Raise InputError if a gate without a matrix has options of a matrix."""
    if gate.op == "replace":
        where = "for a function that replaces its target"
        _require(gate, where, "Use output:output, value:value or query:query.", reads=(gate.site,))
        _require(gate, where, "It has no parameters.", grain=("element",), share=("head",), bias=(None,))
    if gate.op == "replace" or gate.reads in ("nothing", "partition"):
        default = (_DEFAULT_INIT_STD,)
        _require(gate, "for a gate without a matrix", rank=(None,), width=(None,), init_std=default)


def _check_placebo(gate: Gate) -> None:
    """Raise InputError if the gate cannot have its placebo."""
    if gate.op == "replace":
        hint = "Compare it with 'none'."
        _require(gate, "for a function that replaces its target", hint, placebo=(None,))
    if gate.reads in ("nothing", "partition"):
        _require(gate, f"for a gate that reads {gate.reads}", placebo=(None, "constant"))
    if gate.placebo == "constant" and gate.op == "multiply" and gate.activation in _ZERO_AT_ZERO and not gate.bias:
        expected = f"a number other than 0 for a constant {gate.activation}"
        hint = "It would always be 0. Set a bias such as b1, or use the placebo 'shuffled'."
        raise InputError("Gate.bias", expected=expected, got=gate.bias, hint=hint)


def _suggest(text: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(text.lower(), choices, n=3, cutoff=0.5) or list(choices)
    return f"Did you mean {' or '.join(near)}?" if len(near) <= 3 else f"Known: {', '.join(near)}."


def _finite(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"Gate.{name}", expected="a finite number", got=value)
    return float(value)


# The parts after site:reads: a word is the value of a field, a letter with a number is a numeric field.
_WORDS: dict[str, tuple[str, str]] = {
    **{word: (field, word) for field in ("grain", "activation", "op", "placebo") for word in _CHOICES[field]},
    **{f"shared-{word}": ("share", word) for word in _CHOICES["share"]},
}
_NUMBERS: dict[str, tuple[str, type[int] | type[float]]] = {
    "r": ("rank", int),
    "w": ("width", int),
    "b": ("bias", float),
    "s": ("init_std", float),
}


def _parse_parts(site: str, reads: str, *rest: str) -> dict[str, Any]:
    """Return the fields in the parts of a spelling."""
    options: dict[str, Any] = {"site": site, "reads": reads}
    for part in rest:
        name, value = _WORDS.get(part, ("", None))
        if not name and part[:1] in _NUMBERS:
            name, number = _NUMBERS[part[0]]
            try:
                value = number(part[1:])
            except ValueError:
                name = ""
        if not name:
            hint = f"{_suggest(part, _WORDS)} Numbers are r8 (rank), w12 (width), b1.5 (bias), s0.02 (init_std)."
            raise InputError("gate", expected="a spelling of known parts", got=part, hint=hint)
        if name in options:
            raise InputError("gate", expected=f"a spelling that gives {name} once", got=part)
        options[name] = value
    return options


def _spell_number(value: float) -> str:
    # A spelling never contains '+', which joins gates.
    return f"{value!r}".replace("e+", "e").removesuffix(".0")


PRESETS: dict[str, Gate] = {
    "bma": Gate(site="value", reads="query"),
    "bma-query": Gate(site="output", reads="query"),
    "g1": Gate(site="output", reads="input"),
    "g1-head": Gate(site="output", reads="input", grain="head"),
    "g2": Gate(site="value", reads="input"),
    "g3": Gate(site="key", reads="input"),
    "g4": Gate(site="query", reads="input"),
    "g5": Gate(site="dense", reads="input"),
    "vga": Gate(site="value", reads="value"),
    "sink": Gate(site="output", reads="partition", grain="head", bias=0.0),
    "off-by-one": Gate(site="output", reads="partition", grain="head"),
}
"""The gates with names; `none` is `Gates.parse("none")`."""

_PRESET_NAMES = {gate: name for name, gate in PRESETS.items()}


def legal_gates() -> Iterator[Gate]:
    """Yield every legal site × reads × grain, with other fields at their defaults."""
    for site, reads, grain in product(get_args(Site), get_args(Reads), get_args(Grain)):
        with suppress(InputError):
            yield Gate(site=site, reads=reads, grain=grain)
