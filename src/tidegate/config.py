"""What the models are made of: one frozen dataclass for each, as JSON and back."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self, TypeAlias, TypeVar, cast, final, get_args

from tidegate.gates import GateLike, Gates
from tidegate.sizes import HeadShape, require_size
from tidegate.tensors.rotary import Rotary

FeedForwardKind: TypeAlias = Literal["swiglu", "gelu"]
MetricKind: TypeAlias = Literal["diagonal", "learned"]
NormKind: TypeAlias = Literal["rms", "layer"]
PositionKind: TypeAlias = Literal["rotary", "learned", "none"]
Pooling: TypeAlias = Literal["class", "mean"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StackConfig(ABC):
    """What every model says of its blocks; small by default."""

    gate: GateLike = "bma"
    """The gates of every attention layer; whatever spells them is kept as `Gates`."""
    d_model: int = 128
    """Width of the residual stream."""
    num_layers: int = 4
    """Blocks, one after another."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int | None = None
    """Key/value heads, dividing `num_heads`; None has as many as query heads."""
    head_dim: int | None = None
    """Width of a head; None is `d_model / num_heads`."""
    d_ff: int | tuple[int, ...] | None = None
    """Inner width of the feed-forward layers, one for all or one for each; None derives it, see `feedforward_width`."""
    feedforward: FeedForwardKind = "swiglu"
    norm: NormKind = "rms"
    qk_norm: bool = False
    """Whether queries and keys pass a root-mean-square norm."""
    metric: MetricKind | None = None
    """The metric of each head; None is the plain product."""
    temperature: float = 1.0
    """Divides the attention scores."""
    bias: bool = False
    """Whether projections and layer norms inside the blocks have biases."""
    dropout: float = 0.0
    """Share of the embeddings and of each residual branch that is dropped in training."""
    attention_dropout: float = 0.0
    """Share of the attention weights that is dropped in training; it builds the score matrix."""
    recompute_gate: bool = False
    """Compute gates again in the backward pass instead of keeping what they made."""
    checkpoint_blocks: bool = False
    """Keep the input of each block alone, and compute the block again in the backward pass."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "gate", Gates.parse(self.gate))
        self._require_whole("d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        self._require_widths()
        self._require_choice("feedforward", get_args(FeedForwardKind))
        self._require_choice("norm", get_args(NormKind))
        self._require_choice("metric", (*get_args(MetricKind), None))
        for name in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie in [0, 1); got {getattr(self, name)!r}.")
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError(f"temperature must be a finite number above 0; got {self.temperature!r}.")
        Gates.parse(self.gate).num_parameters(**asdict(self.shape))

    @property
    @abstractmethod
    def causal(self) -> bool:
        """Whether a position sees no later one."""

    @property
    @abstractmethod
    def reach(self) -> int | None:
        """Keys that a query sees, itself included; None is all of them."""

    @property
    @abstractmethod
    def rope(self) -> Rotary | None:
        """How queries and keys turn with their positions, if they do."""

    @property
    def shape(self) -> HeadShape:
        """The sizes of an attention layer, the defaults filled in."""
        return HeadShape.of(
            d_model=self.d_model, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )

    @property
    def feedforward_width(self) -> int:
        """`d_ff`, or 4 `d_model` for gelu and 8/3 `d_model`, rounded up to a multiple of 8, for swiglu.

        Either way the layer has about 8 `d_model`² numbers. Blocks of several widths each have their own: ask `block`.
        """
        if isinstance(self.d_ff, tuple):
            raise ValueError(f"d_ff is {self.d_ff}, a width for each block: ask config.block(index).feedforward_width.")
        if self.d_ff is not None:
            return self.d_ff
        return 4 * self.d_model if self.feedforward == "gelu" else 8 * math.ceil(self.d_model / 3)

    def block(self, index: int) -> Self:
        """The configuration of one block, with its own feed-forward width."""
        return replace(self, d_ff=self.d_ff[index]) if isinstance(self.d_ff, tuple) else self

    def to_json(self) -> str:
        """All fields as a JSON object, the gates as they are spelled; `from_json` reads it back."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        plain = {name: asdict(value) if isinstance(value, Rotary) else value for name, value in values.items()}
        return json.dumps(plain | {"gate": str(self.gate)})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote; missing fields take their defaults, unknown ones are refused."""
        data: Any = json.loads(text)
        if isinstance(data, dict) and "rotary" in data:
            data["rotary"] = _from_fields(Rotary, cast("Any", data["rotary"]))
        return _from_fields(cls, cast("Any", data))

    def _require_whole(self, *names: str) -> None:
        for name in names:
            optional = next(option for option in fields(self) if option.name == name).default is None
            require_size(name, getattr(self, name), otherwise="or None" if optional else "")

    def _require_widths(self) -> None:
        if not isinstance(self.d_ff, tuple | list):
            return self._require_whole("d_ff")
        object.__setattr__(self, "d_ff", tuple(self.d_ff))
        if len(self.d_ff) != self.num_layers or any(type(width) is not int or width < 1 for width in self.d_ff):
            raise ValueError(f"d_ff must be one width, or one of each of {self.num_layers} blocks; got {self.d_ff!r}.")
        return None

    def _require_choice(self, name: str, choices: tuple[str | None, ...]) -> None:
        if (value := getattr(self, name)) not in choices:
            *others, last = map(repr, choices)
            raise ValueError(f"{name} must be {', '.join(others)} or {last}; got {value!r}.")


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig(StackConfig):
    """A decoder language model."""

    vocab_size: int = 256
    """Tokens; 256 reads bytes."""
    max_length: int = 256
    """Positions that the model is made for. A table of learned positions ends there; the other kinds run past it."""
    positions: PositionKind = "rotary"
    rotary: Rotary = field(default_factory=Rotary)
    """The details of `positions="rotary"`."""
    window: int | None = None
    """Keys that a query sees, itself included; None is all of them."""
    tie_embeddings: bool = True
    """Whether the output head is the token embedding."""

    def __post_init__(self) -> None:
        # A class with slots is made anew by its decorator, so that super() without arguments would miss it.
        StackConfig.__post_init__(self)
        self._require_whole("vocab_size", "max_length", "window")
        self._require_choice("positions", get_args(PositionKind))
        if self.rope is not None:
            self.rope.width(self.shape.head_dim)
        elif self.rotary != Rotary():
            raise ValueError(
                f"rotary holds details of positions='rotary'; positions is {self.positions!r}. Leave rotary out."
            )

    @property
    def causal(self) -> bool:
        """Always."""
        return True

    @property
    def reach(self) -> int | None:
        """The window."""
        return self.window

    @property
    def rope(self) -> Rotary | None:
        """The rotary embedding, where positions are rotary."""
        return self.rotary if self.positions == "rotary" else None


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class VisionConfig(StackConfig):
    """A classifier of square images, cut into square patches; every patch sees every other."""

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
    """What is classified: a token of its own in front of the patches, or the mean over them."""

    def __post_init__(self) -> None:
        StackConfig.__post_init__(self)
        self._require_whole("image_size", "patch_size", "channels", "num_classes")
        self._require_choice("pooling", get_args(Pooling))
        if self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size must divide image_size; got patch_size={self.patch_size}, image_size={self.image_size}."
            )

    @property
    def causal(self) -> bool:
        """Never."""
        return False

    @property
    def reach(self) -> int | None:
        """No limit."""
        return None

    @property
    def rope(self) -> Rotary | None:
        """None: positions are learned."""
        return None

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_tokens(self) -> int:
        """Positions that the blocks see: the patches, and the class token if there is one."""
        return self.num_patches + (self.pooling == "class")


_Data = TypeVar("_Data", bound=StackConfig | Rotary)


def _from_fields(kind: type[_Data], data: object) -> _Data:
    if not isinstance(data, dict):
        raise ValueError(f"{kind.__name__} in JSON is an object of fields; got {data!r}.")
    options, known = cast("dict[str, Any]", data), [option.name for option in fields(kind)]
    if unknown := sorted(set(options).difference(known)):
        raise ValueError(f"{kind.__name__} has no field {', '.join(unknown)}. Known: {', '.join(known)}.")
    return kind(**options)
