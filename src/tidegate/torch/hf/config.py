"""The configuration of our decoder language model in the format of transformers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Self

from transformers import PreTrainedConfig

from tidegate._validation import require_bool
from tidegate.config import FeedForwardKind, Init, MetricKind, NormKind, PositionKind, Rotary, TransformerConfig
from tidegate.gates import GateLike, Gates

_DEFAULT = TransformerConfig()
_RENAMED = {
    "temperature": "attention_temperature",
    "max_length": "max_position_embeddings",
    "tie_embeddings": "tie_word_embeddings",
}


class TidegateConfig(PreTrainedConfig):
    """The fields of `tidegate.config.TransformerConfig`, and those that transformers requires of every configuration.

    Three fields have another name, since transformers uses theirs for something else: `attention_temperature` for
    `temperature`, `max_position_embeddings` for `max_length`, `tie_word_embeddings` for `tie_embeddings`. The gates are
    stored as strings and the rotary embedding as a dict of its fields, so that the whole configuration is JSON.

    Raises:
        InputError: A size or an option is invalid.
    """

    model_type = "tidegate"
    attribute_map = {  # noqa: RUF012, as transformers declares it
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "num_key_value_heads": "num_kv_heads",
    }
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012, as transformers declares it

    gate: GateLike = str(_DEFAULT.gate)
    d_model: int = _DEFAULT.d_model
    num_layers: int = _DEFAULT.num_layers
    num_heads: int = _DEFAULT.num_heads
    num_kv_heads: int | None = _DEFAULT.num_kv_heads
    head_dim: int | None = _DEFAULT.head_dim
    d_ff: int | list[int] | tuple[int, ...] | None = _DEFAULT.d_ff
    feedforward: FeedForwardKind = _DEFAULT.feedforward
    norm: NormKind = _DEFAULT.norm
    qk_norm: bool = _DEFAULT.qk_norm
    metric: MetricKind | None = _DEFAULT.metric
    attention_temperature: float = _DEFAULT.temperature
    bias: bool = _DEFAULT.bias
    dropout: float = _DEFAULT.dropout
    attention_dropout: float = _DEFAULT.attention_dropout
    recompute_gate: bool = _DEFAULT.recompute_gate
    init: Init = _DEFAULT.init
    checkpoint_blocks: bool = _DEFAULT.checkpoint_blocks
    vocab_size: int = _DEFAULT.vocab_size
    max_position_embeddings: int = _DEFAULT.max_length
    positions: PositionKind = _DEFAULT.positions
    rotary: Rotary | dict[str, Any] | None = None
    window: int | None = _DEFAULT.window
    tie_word_embeddings: bool = _DEFAULT.tie_embeddings

    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name, hint in TidegateConfig.__annotations__.items():
            # Annotations are strings in this file. Checked here, since some fields have another name in ours.
            if hint == "bool":
                require_bool(name, getattr(self, name))
        self.gate = str(Gates.parse(self.gate))
        rotary = Rotary(**self.rotary) if isinstance(self.rotary, dict) else self.rotary or Rotary()
        self.rotary = rotary.to_dict()
        self.d_ff = list(self.d_ff) if isinstance(self.d_ff, tuple) else self.d_ff
        super().__post_init__(**kwargs)
        # Raises InputError for invalid sizes and options.
        self.transformer_config()

    @classmethod
    def from_transformer_config(cls, config: TransformerConfig) -> Self:
        """Return the configuration of the same model for transformers; `transformer_config` is the inverse."""
        return cls(**{_RENAMED.get(field.name, field.name): getattr(config, field.name) for field in fields(config)})

    def transformer_config(self) -> TransformerConfig:
        """Return the configuration of the `TransformerLM` with the same blocks."""
        options: dict[str, Any] = {
            field.name: getattr(self, _RENAMED.get(field.name, field.name)) for field in fields(TransformerConfig)
        }
        options["rotary"] = Rotary(**options["rotary"])
        return TransformerConfig(**options)
