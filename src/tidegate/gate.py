"""The gate vocabulary: what a gate multiplies, what it reads, and how many numbers that costs.

Every part of the library (layers, parameter counts, decompositions, reports, the command line) reads these definitions.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias, cast, get_args

from tidegate._json import parse_json
from tidegate._text import echo
from tidegate.sizes import HeadShape, require_size

Site: TypeAlias = Literal["output", "value", "key", "query", "dense"]
Reads: TypeAlias = Literal["input", "query", "value", "output", "partition", "nothing"]
Grain: TypeAlias = Literal["element", "head"]
Share: TypeAlias = Literal["head", "group", "layer"]
Activation: TypeAlias = Literal["sigmoid", "silu", "softplus", "tanh1", "twosigmoid", "identity", "gelu", "tanh"]
Op: TypeAlias = Literal["multiply", "add", "replace"]
Placebo: TypeAlias = Literal["constant", "shuffled"]

GatePath: TypeAlias = Literal["query", "key", "value", "partition", "output", "dense"]

GATE_PATHS: tuple[GatePath, ...] = get_args(GatePath)
"""What gates go by in a layer, in the order in which it meets them: the canonical order of several gates."""

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
    """One gate: `target op activation(reads W + b)`, at one site of an attention layer."""

    site: Site = "output"
    """What it acts on: a head's attention output, its value, key or query, or the output projection's result."""
    reads: Reads = "input"
    """What it is computed from: the layer's input, the head's own query, the value, the attention output, nothing (a
    trained constant), or the logarithm of the head's partition function, with the weight 1: that gate is a sink in the
    softmax's denominator."""
    grain: Grain = "element"
    """One number per feature, or one number per head."""
    share: Share = "head"
    """Each head its own matrix, one for each key/value group, or one for all heads."""
    activation: Activation = "sigmoid"
    """`tanh1` is 1 + tanh and `twosigmoid` is 2 sigmoid: both are exactly 1 at zero."""
    op: Op = "multiply"
    """How the gate meets its target; `replace` puts the activation of the target itself in its place, without a
    matrix: a pointwise function instead of a gate."""
    rank: int | None = None
    """Rank of the gate's matrix, stored as two factors; None stores it whole."""
    width: int | None = None
    """Read only the first `width` channels; None reads them all."""
    init_std: float = _DEFAULT_INIT_STD
    """Standard deviation of the matrix at the start; 0 starts at zero."""
    bias: float | None = None
    """Starting value of a trainable bias, which sets how open the gate starts; None has no bias, and is 0 for a gate
    that reads nothing."""
    placebo: Placebo | None = None
    """A control that has all of the gate but what it is meant to do. `constant` stays at the starting value and learns
    nothing; for the partition function it has the logarithm of the number of visible keys. `shuffled` reads the same
    position of the next sequence in the batch, without a gradient to it. None is the gate itself."""

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if name != "placebo" or self.placebo is not None:
                _require_choice(name, getattr(self, name), choices)
        for name in ("rank", "width"):
            require_size(f"Gate.{name}", getattr(self, name), otherwise="or None")
        object.__setattr__(self, "init_std", _finite("init_std", self.init_std))
        if self.init_std < 0:
            raise ValueError(f"Gate.init_std must not be negative; got {echo(self.init_std)}.")
        if self.bias is not None:
            object.__setattr__(self, "bias", _finite("bias", self.bias))
        elif self.reads == "nothing":
            object.__setattr__(self, "bias", 0.0)
        reason = (
            _objection(self.site, self.reads, self.grain, self.share)
            or _sink_objection(self)
            or _matrix_objection(self)
            or _placebo_objection(self)
        )
        if reason is not None:
            raise ValueError(f"Gate {self.site}:{self.reads} is refused: {reason}")

    @property
    def path(self) -> GatePath:
        """What its parameters and values go by in a layer: its site, or `partition` for the gate that reads that."""
        return "partition" if self.reads == "partition" else self.site

    @property
    def has_matrix(self) -> bool:
        """Whether what it reads passes a matrix of its own."""
        return self.reads not in ("partition", "nothing") and self.op != "replace" and self.placebo != "constant"

    @property
    def has_bias(self) -> bool:
        """Whether it learns a bias; a constant placebo keeps the value that its bias would start from."""
        return self.bias is not None and self.placebo != "constant"

    @property
    def is_blind(self) -> bool:
        """Whether it is the same at every position and of every sequence."""
        return self.reads == "nothing" or (self.placebo == "constant" and self.reads != "partition")

    @property
    def starting_value(self) -> float | None:
        """What it multiplies by, or adds, before it has learned anything, but for the noise of its matrix at the start.

        None for a sink, whose value depends on the number of keys, and for a function in the target's place.
        """
        if self.reads == "partition" or self.op == "replace":
            return None
        return _START[self.activation](self.bias or 0.0)

    @property
    def changes_nothing(self) -> bool:
        """Whether it multiplies by exactly 1 and always will, as the constant placebo of a gate from 1 does."""
        return self.placebo == "constant" and self.op == "multiply" and self.starting_value == 1

    @property
    def is_undone_by_norm(self) -> bool:
        """Whether it multiplies whole queries or keys by one positive number, which a norm of theirs divides out."""
        positive = self.activation in ("sigmoid", "softplus", "tanh1", "twosigmoid")
        is_one_factor = self.op == "multiply" and (self.grain == "head" or self.placebo == "constant")
        return self.site in ("query", "key") and is_one_factor and positive

    @property
    def on_source(self) -> bool:
        """Whether it acts on the attended position (key and value sites), so before the cache."""
        return self.site in _SOURCE_SITES

    @property
    def needs_self_attention(self) -> bool:
        """Whether it reads, at the position it acts on, something that only self-attention has there."""
        if self.is_blind:
            return False
        return self.reads == "query" if self.on_source else self.reads == "value"

    def require_cross_attention(self) -> None:
        """Refuse, with what to use instead, if the gate cannot serve cross-attention."""
        if self.needs_self_attention:
            raise ValueError(
                f"Gate {self} reads the {self.reads} at the position that it gates, which only self-attention has. "
                "For cross-attention use a gate that reads what its own side has, such as 'bma-query' or 'g1'."
            )

    def require_other_sequences(self, num_sequences: int, *, cached: bool = False) -> None:
        """Refuse, if the gate reads another sequence of the batch, a batch of one and the steps of a cache."""
        if self.placebo != "shuffled":
            return
        if cached:
            raise ValueError(
                f"Gate {self} reads the next sequence of the batch, which has nothing to do with the text that a cache "
                "continues. Read the whole batch at once, without a cache."
            )
        if num_sequences < 2:
            raise ValueError(
                f"Gate {self} reads the next sequence of the batch, and the batch has {num_sequences}. "
                "Give it two or more."
            )

    @property
    def spelling(self) -> str:
        """The full spelling, `site:reads` and whatever differs from the defaults."""
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
        """The preset's name where there is one, the full spelling elsewhere; `Gate.parse` reads both."""
        return _PRESET_NAMES.get(self) or self.spelling

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Read a preset's name or a spelling such as `output:input:head:silu`."""
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"A gate is spelled as a string, like 'bma' or 'value:query'; got {echo(text)}.")
        text = text.strip()
        if text in PRESETS:
            return PRESETS[text]
        if text == "none":
            raise ValueError("'none' is the absence of a gate, not one gate: use Gates.parse('none').")
        if "+" in text:
            raise ValueError(f"{echo(text)} names several gates: use Gates.parse({echo(text)}).")
        if "," in text:
            joined = "+".join(part.strip() for part in text.split(","))
            raise ValueError(f"{echo(text)} has a comma. Gates are joined by '+': write {echo(joined)}.")
        if ":" not in text:
            raise ValueError(f"Unknown gate {echo(text)}. {_suggest(text, ('none', *PRESETS))} Or spell it site:reads.")
        site, reads, *rest = text.split(":")
        if site in PRESETS:
            spelled = _with_parts(PRESETS[site], (reads, *rest))
            raise ValueError(f"A preset's name stands alone; got {echo(text)}. Spell it {echo(spelled)}.")
        options: dict[str, Any] = {"site": site, "reads": reads}
        for part in rest:
            name, value = _parse_part(part, text)
            if name in options:
                raise ValueError(f"Gate {echo(text)} gives {name} twice, the second time as {echo(part)}.")
            options[name] = value
        return cls(**options)

    def to_json(self) -> str:
        """All fields as a JSON object; `Gate.from_json` reads it back."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Gate:
        """Read what `to_json` wrote; missing fields take their defaults, unknown ones are refused."""
        data = parse_json(text)
        if not isinstance(data, dict):
            raise ValueError(f"A gate in JSON is an object with fields like 'site' and 'reads'; got {echo(text)}.")
        options = cast("dict[str, Any]", data)
        known = tuple(field.name for field in fields(cls))
        for name in options:
            if name not in known:
                raise ValueError(f"A gate has no field {echo(name)}. {_suggest(name, known)}")
        return cls(**options)

    def num_heads_at_site(self, shape: HeadShape) -> int:
        """Heads that the gated tensor has; the dense site has none and counts as one."""
        if self.site == "dense":
            return 1
        return shape.num_kv_heads if self.on_source else shape.num_heads

    def num_matrices(self, shape: HeadShape) -> int:
        """How many matrices the heads at the site have between them."""
        match self.share:
            case "head":
                return self.num_heads_at_site(shape)
            case "group":
                return shape.num_kv_heads
            case "layer":
                return 1

    def read_width(self, shape: HeadShape) -> int:
        """Channels that one gate reads."""
        full = self._full_read_width(shape)
        if self.width is not None and self.width > full:
            raise ValueError(
                f"Gate.width must be at most {full}, what {self.site}:{self.reads} reads; got {echo(self.width)}."
            )
        return full if self.width is None else self.width

    def gated_width(self, shape: HeadShape) -> int:
        """Numbers that one gate gives at one position; a constant is one number for all features."""
        if self.grain == "head" or self.placebo == "constant":
            return 1
        return shape.d_model if self.site == "dense" else shape.head_dim

    def parameter_shapes(
        self, *, d_model: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None
    ) -> dict[str, tuple[int, ...]]:
        """Shape of each parameter by name, heads first.

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
        """How many numbers the gate adds to a layer."""
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


def _objection(site: Site, reads: Reads, grain: Grain, share: Share) -> str | None:
    """Why a combination makes no sense, and what to use instead; None if it does."""
    if site == "dense":
        if reads not in ("input", "output", "nothing"):
            return f"the output projection leaves no heads, so no {reads} of a head; use dense:input or dense:output."
        if grain == "head":
            return "the output projection leaves no heads to gate one by one; use grain 'element', or the output site."
        if share != "head":
            return "the output projection leaves no heads to share between; leave share at 'head'."
    elif reads == "partition":
        if site != "output":
            return (
                "a head's partition function belongs to its attention output; use 'sink', which learns a logit, or "
                "'off-by-one', whose logit is 0."
            )
        if grain == "element":
            return (
                "a head has one partition function for all its features; use 'sink', which learns a logit, or "
                "'off-by-one', whose logit is 0."
            )
        if share != "head":
            return "each head has a sink of its own; leave share at 'head'."
    elif reads == "output" and site != "output":
        return (
            f"the attention output comes from the {site}, so it would read itself; use {site}:input or output:output."
        )
    return None


def _sink_objection(gate: Gate) -> str | None:
    """Why a gate that reads the partition function is no sink of the softmax, and what to do; None if it is one."""
    if gate.reads != "partition":
        return None
    if gate.activation != "sigmoid" or gate.op != "multiply":
        return (
            "only a factor sigmoid(log Z + b) is a sink in the softmax's denominator; "
            "leave activation at 'sigmoid' and op at 'multiply'."
        )
    if (gate.rank, gate.width, gate.init_std) != (None, None, _DEFAULT_INIT_STD):
        return "log Z enters with the weight 1 and not through a matrix; leave rank, width and init_std as they are."
    return None


def _matrix_objection(gate: Gate) -> str | None:
    """Why a gate without a matrix cannot be what its other fields say; None if it can."""
    if gate.op == "replace":
        if gate.reads != gate.site:
            return "a function that replaces its target reads it; use output:output, value:value or query:query."
        if (gate.grain, gate.share, gate.bias) != ("element", "head", None):
            return "a function that replaces its target has no parameters; leave grain, share and bias as they are."
    if gate.reads != "nothing" and gate.op != "replace":
        return None
    if (gate.rank, gate.width, gate.init_std) != (None, None, _DEFAULT_INIT_STD):
        return "it has no matrix; leave rank, width and init_std as they are."
    return None


def _placebo_objection(gate: Gate) -> str | None:
    """Why a gate has no such placebo, and what to use instead; None if it has, or is no placebo."""
    if gate.placebo is None:
        return None
    if gate.op == "replace":
        return "a function that replaces its target has no placebo; compare it with 'none'."
    if gate.placebo == "shuffled":
        if gate.reads == "nothing":
            return "a gate that reads nothing has nothing to shuffle; use the placebo 'constant'."
        if gate.reads == "partition":
            return "a sink's placebo is 'constant', which has the number of visible keys for its partition function."
    elif gate.op == "multiply" and gate.activation in _ZERO_AT_ZERO and not gate.bias:
        return (
            f"{gate.activation} starts at 0, and a constant 0 lets nothing pass; give it a bias such as b1, or use the "
            "placebo 'shuffled'."
        )
    return None


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"Gate.{name} cannot be {echo(value)}. {_suggest(str(value), choices)}")


def _suggest(text: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(text.lower(), choices, n=3, cutoff=0.5) or list(choices)
    return f"Did you mean {' or '.join(near)}?" if len(near) <= 3 else f"Known: {', '.join(near)}."


def _finite(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"Gate.{name} must be a finite number; got {echo(value)}.")
    return float(value)


# What each part after site:reads says: a word is a value of a field, a letter and a number is a numeric field.
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


def _parse_part(part: str, text: str) -> tuple[str, Any]:
    """The field and value that one part of a spelling says."""
    if part in _WORDS:
        return _WORDS[part]
    if part[:1] in _NUMBERS:
        field, number = _NUMBERS[part[0]]
        try:
            return field, number(part[1:])
        except ValueError:
            pass
    raise ValueError(
        f"Gate {echo(text)} has the unknown part {echo(part)}. {_suggest(part, _WORDS)} "
        "Numbers are written r8 (rank), w12 (width), b1.5 (bias) and s0.02 (starting deviation)."
    )


def _with_parts(gate: Gate, parts: Iterable[str]) -> str:
    """The gate's spelling with more parts, those that say the same field left out of it."""
    own, added = gate.spelling.split(":"), list(parts)
    try:
        fields = {_parse_part(part, "")[0] for part in added}
        own = own[:2] + [part for part in own[2:] if _parse_part(part, "")[0] not in fields]
    except ValueError:
        # An unknown part is named when the new spelling is read.
        pass
    return ":".join((*own, *added))


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
"""The gates that have names of their own; `none` is `Gates.parse("none")`."""

_PRESET_NAMES = {gate: name for name, gate in PRESETS.items()}


def legal_gates() -> Iterator[Gate]:
    """Every legal site × reads × grain, the other fields at their defaults: the family that the laws run over."""
    for site in get_args(Site):
        for reads in get_args(Reads):
            for grain in get_args(Grain):
                if _objection(site, reads, grain, "head") is None:
                    yield Gate(site=site, reads=reads, grain=grain)
