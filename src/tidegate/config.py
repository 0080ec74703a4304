"""The options of an attention layer, and the configurations of models, for every framework.

`AttentionConfig` declares and checks a layer's options; constructors repeat names and defaults, and a test compares.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeAlias, final, get_args

from tidegate._json import decode, parse_json
from tidegate._text import short_repr
from tidegate._validation import (
    InputError,
    require_bool,
    require_choice,
    require_dropout,
    require_positive,
    require_size,
)
from tidegate.gates import GateLike, Gates
from tidegate.sizes import HeadShape

FeedForwardKind: TypeAlias = Literal["swiglu", "gelu"]
MetricKind: TypeAlias = Literal["diagonal", "learned"]
NormKind: TypeAlias = Literal["rms", "layer"]
PositionKind: TypeAlias = Literal["rotary", "learned", "none"]
Pooling: TypeAlias = Literal["class", "mean"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotary:
    """Rotary embedding: position p rotates pair i by `(p + offset) / scale · base^(−2i/w)`."""

    base: float = 10_000.0
    """The slowest pair rotates by nearly 1/base per position."""
    fraction: float = 1.0
    """Fraction of a head's channels that rotate, the first ones."""
    scale: float = 1.0
    """Divides positions: 4 fits four times the training length into the trained angles."""
    offset: int = 0
    """Added to every position."""
    ramp: tuple[float, float] | None = None
    """Two pairs, as in YaRN: pairs up to the first ignore the scale, pairs from the second on use it, and those
    between interpolate. None scales all pairs."""

    def __post_init__(self) -> None:
        for name in ("base", "scale"):
            require_positive(f"Rotary.{name}", getattr(self, name))
        if not 0 < self.fraction <= 1:
            raise InputError("Rotary.fraction", expected="in (0, 1]", got=self.fraction)
        if self.ramp is not None:
            # JSON has no tuples.
            ramp = tuple(self.ramp)
            if len(ramp) != 2 or not -math.inf < ramp[0] < ramp[1] < math.inf:
                raise InputError("Rotary.ramp", expected="two finite numbers, the first below the second", got=ramp)
            object.__setattr__(self, "ramp", ramp)

    @classmethod
    def yarn(
        cls,
        head_dim: int,
        *,
        base: float,
        factor: float,
        original_length: int,
        fast: float = 32.0,
        slow: float = 1.0,
        truncate: bool = True,
    ) -> Rotary:
        """Return YaRN's embedding for positions beyond the training length, which scales only slowly rotating pairs.

        YaRN also multiplies scores by `(1 + 0.1 log factor)²`: divide the layer's `temperature` by that.

        Args:
            head_dim: Width of a head, all of which rotates.
            base: As in `Rotary`.
            factor: The new length in units of the training length.
            original_length: The training length.
            fast: Pairs with more rotations over that length are not scaled.
            slow: Pairs with fewer rotations over that length are scaled.
            truncate: Whether the ramp begins and ends at whole pairs.
        """
        first, last = (
            head_dim * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(base))
            for turns in (fast, slow)
        )
        if truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        return cls(base=base, scale=factor, ramp=(first, last if last != first else last + 0.001))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, `ramp` only if given, which keeps the hashes of earlier runs."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def width(self, head_dim: int) -> int:
        """Return the number of channels that rotate: `fraction` of the head, which must be even."""
        width = round(head_dim * self.fraction)
        if width % 2 or width == 0 or not math.isclose(width, head_dim * self.fraction, abs_tol=1e-6):
            expected = f"a fraction that selects an even number of the head's {head_dim} channels"
            hint = f"It selects {head_dim * self.fraction:g}."
            raise InputError("Rotary.fraction", expected=expected, got=self.fraction, hint=hint)
        return width

    def frequencies(self, head_dim: int) -> list[float]:
        """Return the angle of each pair at position 1, before the scale."""
        width = self.width(head_dim)
        return [self.base ** (-2 * pair / width) * self._undo_scale(pair) for pair in range(width // 2)]

    def _undo_scale(self, pair: int) -> float:
        """Return the factor of a pair's angle that cancels the scale, in part within the ramp."""
        if self.ramp is None:
            return 1.0
        first, last = self.ramp
        share = min(max((pair - first) / (last - first), 0.0), 1.0)
        return share + (1 - share) * self.scale


def _keep(value: object) -> object:
    """Leave a gate from JSON to `__post_init__`, which parses it and names the field in errors."""
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerOptions:
    """The options that a model passes unchanged to all its attention layers."""

    gate: GateLike = field(default="bma", metadata={"decode": _keep})
    """A spelling such as `"bma"` or `"g1+g2"`, a `Gate`, or several; stored as `Gates`. `"none"` is plain attention."""
    d_model: int
    """Width of a layer's input and output, the residual stream."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int | None = None
    """Key/value heads, a divisor of `num_heads`; None for as many as query heads."""
    head_dim: int | None = None
    """Width of a head; None is `d_model / num_heads`."""
    qk_norm: bool = False
    """Whether queries and keys have an RMS norm, with one scale for all heads."""
    metric: MetricKind | None = None
    """A metric per head, initially the identity; None is the plain product."""
    temperature: float = 1.0
    """Divides the attention scores."""
    bias: bool = False
    """Whether projections have biases, and in models the layer norms inside the blocks."""
    recompute_gate: bool = False
    """Recompute gates in the backward pass instead of storing their results."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "gate", Gates.parse(self.gate))
        for option in fields(self):
            _require_type(option.name, str(option.type), getattr(self, option.name))
        require_positive("temperature", self.temperature)
        shape = self.shape
        for gate in self.gates:
            gate.read_width(shape)

    @property
    def gates(self) -> Gates:
        """Return the parsed gates."""
        return Gates.parse(self.gate)

    @property
    def shape(self) -> HeadShape:
        """Return the sizes of a layer with defaults filled in."""
        return HeadShape.of(
            d_model=self.d_model, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )


_CHOICES: dict[str, tuple[str | None, ...]] = {
    "FeedForwardKind": get_args(FeedForwardKind),
    "MetricKind | None": (*get_args(MetricKind), None),
    "NormKind": get_args(NormKind),
    "PositionKind": get_args(PositionKind),
    "Pooling": get_args(Pooling),
}


def _require_type(name: str, annotation: str, value: object) -> None:
    """Raise InputError unless a value fits its annotation: a size, a boolean or one of several choices."""
    if annotation == "bool":
        require_bool(name, value)
    elif annotation in ("int", "int | None"):
        require_size(name, value, optional=annotation != "int")
    elif annotation in _CHOICES:
        require_choice(name, value, _CHOICES[annotation])


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig(LayerOptions):
    """The options of one attention layer, the same in PyTorch and in JAX. Hashable, so static to `jax.jit`."""

    causal: bool = True
    """Whether a query sees no later position."""
    dropout: float = 0.0
    """Dropout rate of the attention weights; it computes the full score matrix."""
    rope: Rotary | bool | None = None
    """A rotary embedding; True is the default one, None and False are none."""
    window: int | None = None
    """Number of keys that a query sees, including itself; previous ones if causal, else on both sides. None is all."""

    def __post_init__(self) -> None:
        # The decorator replaces a class with slots, so that super() without arguments fails.
        LayerOptions.__post_init__(self)
        if not isinstance(self.rope, bool | Rotary | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"rope must be a Rotary, True, False or None; got {short_repr(self.rope)}.")
        object.__setattr__(self, "rope", Rotary() if self.rope is True else self.rope or None)
        require_dropout("dropout", self.dropout)
        if self.rotary is not None:
            self.rotary.width(self.shape.head_dim)

    @property
    def rotary(self) -> Rotary | None:
        """Return the rotary embedding, if any."""
        return self.rope if isinstance(self.rope, Rotary) else None

    @property
    def scale(self) -> float:
        """Return the factor of the products of queries and keys."""
        return self.shape.head_dim**-0.5 / self.temperature


Init: TypeAlias = float | Literal["fan-in", "torch"]
"""The initialization of a model's matrices, see `init_std`."""


def init_std(init: Init, *, fan_in: int, num_layers: int, writes: bool) -> float:
    """Return the standard deviation of an initial matrix with `fan_in` inputs.

    A number is the deviation itself, and `fan-in` is 1/√fan_in; both are normal, and divided by √(2n) in matrices that
    write to the residual stream of n blocks, so that its initial scale does not depend on depth. `torch` is the default
    of `nn.Linear`, 1/√(3 fan_in), uniform, for all matrices.
    """
    if init == "torch":
        return (3 * fan_in) ** -0.5
    deviation = fan_in**-0.5 if isinstance(init, str) else init
    return deviation / math.sqrt(2 * num_layers) if writes else deviation


def embedding_std(init: Init) -> float:
    """Return the standard deviation of initial embeddings, always normal: the number, or 0.02 if there is none."""
    return _DEFAULT_INIT_STD if isinstance(init, str) else init


_DEFAULT_INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True, slots=True)
class StackConfig(LayerOptions, ABC):
    """The options of the blocks of every model; small by default."""

    d_model: int = 128
    num_layers: int = 4
    """Number of blocks."""
    num_heads: int = 4
    d_ff: int | tuple[int, ...] | None = None
    """Inner width of the feed-forward layers, for all or for each; None derives it, see `feedforward_width`."""
    feedforward: FeedForwardKind = "swiglu"
    norm: NormKind = "rms"
    dropout: float = 0.0
    """Dropout rate of the embeddings and of each residual branch."""
    attention_dropout: float = 0.0
    """Dropout rate of the attention weights: the `dropout` of the attention layers."""
    init: Init = _DEFAULT_INIT_STD
    """Initialization of matrices: a standard deviation, `fan-in` or `torch`, as in `init_std`."""
    checkpoint_blocks: bool = False
    """Store only the input of each block, and recompute the block in the backward pass."""

    def __post_init__(self) -> None:
        LayerOptions.__post_init__(self)
        if isinstance(self.d_ff, tuple | list):
            object.__setattr__(self, "d_ff", tuple(self.d_ff))
            if len(self.d_ff) != self.num_layers or any(type(width) is not int or width < 1 for width in self.d_ff):
                expected = f"one width, or one for each of {self.num_layers} blocks"
                raise InputError("d_ff", expected=expected, got=self.d_ff)
        else:
            require_size("d_ff", self.d_ff, optional=True)
        is_std = isinstance(self.init, int | float) and self.init is not True and 0 < self.init < math.inf
        if not is_std and self.init not in ("fan-in", "torch"):
            raise InputError("init", expected="a standard deviation above 0, 'fan-in' or 'torch'", got=self.init)
        for name in ("dropout", "attention_dropout"):
            require_dropout(name, getattr(self, name))

    @property
    @abstractmethod
    def attention(self) -> AttentionConfig:
        """Return the options of each attention layer."""

    @property
    def causal(self) -> bool:
        """Return whether attention is causal."""
        return self.attention.causal

    @property
    def feedforward_width(self) -> int:
        """Return `d_ff`, or 4 `d_model` for gelu and 8/3 `d_model`, rounded up to a multiple of 8, for swiglu.

        Both give a layer of about 8 `d_model`² parameters. For blocks of different widths call `block` first.
        """
        if isinstance(self.d_ff, tuple):
            hint = "Read config.block(index).feedforward_width instead."
            raise InputError("d_ff", expected="one width", got=self.d_ff, hint=hint)
        if self.d_ff is not None:
            return self.d_ff
        return 4 * self.d_model if self.feedforward == "gelu" else 8 * math.ceil(self.d_model / 3)

    def block(self, index: int) -> Self:
        """Return the configuration of one block, with its own feed-forward width."""
        return replace(self, d_ff=self.d_ff[index]) if isinstance(self.d_ff, tuple) else self

    def to_json(self) -> str:
        """Return all fields as a JSON object for `from_json`, with gates as spellings."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        plain = {name: value.to_dict() if isinstance(value, Rotary) else value for name, value in values.items()}
        return json.dumps(plain | {"gate": str(self.gate)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the result of `to_json`; missing fields take their defaults. Raise InputError for unknown ones."""
        return decode(cls, parse_json(text))

    def _attention(self, *, causal: bool, rope: Rotary | None, window: int | None) -> AttentionConfig:
        shared: dict[str, Any] = {option.name: getattr(self, option.name) for option in fields(LayerOptions)}
        return AttentionConfig(**shared, causal=causal, dropout=self.attention_dropout, rope=rope, window=window)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig(StackConfig):
    """A decoder language model."""

    vocab_size: int = 256
    """Number of tokens; 256 for bytes."""
    max_length: int = 256
    """Maximum number of positions. Only a table of learned positions cannot be exceeded."""
    positions: PositionKind = "rotary"
    rotary: Rotary = field(default_factory=Rotary)
    """Options of `positions="rotary"`."""
    window: int | None = None
    """Number of keys that a query sees, including itself; None is all."""
    tie_embeddings: bool = True
    """Whether the output head is the token embedding."""

    def __post_init__(self) -> None:
        StackConfig.__post_init__(self)
        # The property checks the other options.
        if self.attention.rotary is None and self.rotary != Rotary():
            hint = f"positions is {self.positions!r}."
            raise InputError("rotary", expected="left out unless positions='rotary'", hint=hint)

    @property
    def attention(self) -> AttentionConfig:
        """Return the options of causal layers."""
        rope = self.rotary if self.positions == "rotary" else None
        return self._attention(causal=True, rope=rope, window=self.window)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig(StackConfig):
    """A classifier of square images, split into square patches; attention is not causal."""

    d_model: int = 64
    feedforward: FeedForwardKind = "gelu"
    norm: NormKind = "layer"
    image_size: int = 32
    """Height and width, a multiple of `patch_size`."""
    patch_size: int = 4
    """Height and width of a patch."""
    channels: int = 3
    num_classes: int = 10
    pooling: Pooling = "class"
    """Whether a class token before the patches is classified, or the mean over patches."""

    def __post_init__(self) -> None:
        StackConfig.__post_init__(self)
        if self.image_size % self.patch_size:
            raise InputError("patch_size", expected=f"a divisor of image_size={self.image_size}", got=self.patch_size)

    @property
    def attention(self) -> AttentionConfig:
        """Return the options of layers that are not causal; positions are learned."""
        return self._attention(causal=False, rope=None, window=None)

    @property
    def num_patches(self) -> int:
        """Return the number of patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_tokens(self) -> int:
        """Return the number of positions: the patches, and the class token if any."""
        return self.num_patches + (self.pooling == "class")
