"""The decoder language model with the interface of transformers.

Legend: B batch, T positions, S attended positions, H heads, M model width, V tokens of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, initialization
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils.generic import can_return_tuple

from tidegate._validation import InputError, require_known_positions, require_known_tokens, require_learned_positions
from tidegate.config import Init, embedding_std, init_std
from tidegate.torch.block import TransformerBlock, TransformerStack
from tidegate.torch.decoder import look_up
from tidegate.torch.gate import AttentionGate
from tidegate.torch.hf.cache import CachedKeys
from tidegate.torch.hf.config import TidegateConfig
from tidegate.torch.kernel import plain_kernel
from tidegate.torch.metric import HeadMetric


def _init_matrix(linear: nn.Linear, init: Init, *, num_layers: int, writes: bool) -> None:
    std = init_std(init, fan_in=linear.in_features, num_layers=num_layers, writes=writes)
    bound = math.sqrt(3) * std
    if init == "torch":
        initialization.uniform_(linear.weight, -bound, bound)
    else:
        initialization.normal_(linear.weight, std=std)
    if linear.bias is not None:
        initialization.uniform_(linear.bias, -bound, bound) if init == "torch" else initialization.zeros_(linear.bias)


class TidegatePreTrainedModel(PreTrainedModel):
    """The base of our models in transformers: initialization of weights and supported features."""

    config: TidegateConfig
    config_class = TidegateConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _input_embed_layer = "embedding"
    _no_split_modules = ["TransformerBlock"]  # noqa: RUF012, as transformers declares it
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012, as transformers declares it
    _supports_sdpa = True
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize the weights that no checkpoint filled, as `tidegate.torch.initialize` does; keep loaded ones."""
        blocks = cast("TidegateModel", self.base_model).stack.blocks
        if isinstance(module, AttentionGate):
            with initialization.guard_torch_init_functions():
                module.reset_parameters()
        elif isinstance(module, HeadMetric):
            identity = torch.ones_like(module.weight)
            if module.kind == "learned":
                identity = torch.eye(identity.shape[-1], dtype=identity.dtype, device=identity.device)
            initialization.copy_(module.weight, identity.expand_as(module.weight))
        elif isinstance(module, nn.Linear):
            writes = any(
                module in (block.attention.o_proj, block.feedforward.down_proj)
                for block in cast("Iterable[TransformerBlock]", blocks)
            )
            _init_matrix(module, self.config.init, num_layers=len(blocks), writes=writes)
        elif isinstance(module, nn.Embedding):
            initialization.normal_(module.weight, std=embedding_std(self.config.init))
        else:
            super()._init_weights(module)

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Callable[..., Any] = checkpoint, every_n_layers: int = 1
    ) -> None:
        options = getattr(gradient_checkpointing_func, "keywords", {})
        plain = getattr(gradient_checkpointing_func, "func", gradient_checkpointing_func) is checkpoint
        unsupported = {
            "every_n_layers": (every_n_layers != 1, every_n_layers),
            "offload": (not plain, True),
            "gradient_checkpointing_kwargs": (options not in ({}, {"use_reentrant": False}), options),
        }
        for field, (given, value) in unsupported.items():
            if enable and given:
                hint = "This model stores the input of every block, without re-entrance and on the device."
                raise InputError(field, expected="left out", got=value, hint=hint)
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func, every_n_layers)


class TidegateModel(TidegatePreTrainedModel):
    """Maps tokens to the features of each position after all blocks and the norm."""

    def __init__(self, config: TidegateConfig) -> None:
        super().__init__(config)
        blocks = config.transformer_config()
        self.embedding = nn.Embedding(config.vocab_size, config.d_model)
        self.position_embedding = (
            nn.Embedding(config.max_position_embeddings, config.d_model) if config.positions == "learned" else None
        )
        self.stack = TransformerStack(blocks)
        self.post_init()

    @property
    def gradient_checkpointing(self) -> bool:
        """Return whether the stack stores only the input of each block for the backward pass."""
        return self.stack.checkpoint_blocks

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, value: bool) -> None:
        self.stack.checkpoint_blocks = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Return features (B, T, M), the cache if one is used, and the input of each block if requested.

        Args:
            input_ids: (B, T) tokens; or give `inputs_embeds`.
            attention_mask: (B, S), 0 at padding on either side; or a mask that broadcasts to (B, H, T, S).
            position_ids: (B, T); None counts the tokens that are not padding. Without a mask and a cache, a position
                that does not follow the previous one starts a new document, which sees no other; with a cache all
                tokens are one document.
            past_key_values: A dynamic or a static cache, which the tokens continue.
            inputs_embeds: (B, T, M), in place of the tokens' embeddings.
            use_cache: Whether to create a cache if none is given; None creates one if the configuration says so, in
                evaluation, unless `position_ids` may separate documents.
            output_hidden_states: Whether to return the input of each block, and the output of the norm.

        Raises:
            InputError: Both or neither of `input_ids` and `inputs_embeds` are given, tokens or positions are out of
                range, or the mask is of another length.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise InputError("input_ids", expected="given exactly when inputs_embeds is not")
        if inputs_embeds is None:
            assert input_ids is not None
            x_BTM = look_up(self.embedding, input_ids, partial(require_known_tokens, name="input_ids"))
        else:
            x_BTM = inputs_embeds
        packed = position_ids is not None and attention_mask is None and past_key_values is None and not use_cache
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and not packed
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        windowed = self.config.window is not None
        keys = CachedKeys(past_key_values, x_BTM.shape[1], windowed=windowed, device=x_BTM.device)
        if position_ids is None:
            positions, documents = self._count_positions(attention_mask, keys, x_BTM.device), None
        else:
            positions = position_ids.expand(x_BTM.shape[:2])
            documents = F.pad(positions.diff(dim=1) != 1, (1, 0)).cumsum(dim=1) if packed else None
        if self.position_embedding is not None:
            x_BTM = x_BTM + look_up(self.position_embedding, positions, require_known_positions)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states: list[Any] = []
        # transformers has no public name for it.
        eager = self.config._attn_implementation == "eager"  # pyright: ignore[reportPrivateUsage]
        with _block_inputs(self.stack, states) if wanted else nullcontext(), plain_kernel() if eager else nullcontext():
            x_BTM = self.stack(
                x_BTM,
                mask=keys.mask(attention_mask),
                caches=keys.layers(self.config.num_layers),
                positions=positions,
                documents=documents,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=x_BTM, past_key_values=past_key_values, hidden_states=(*states, x_BTM) if wanted else None
        )

    def _count_positions(self, attention_mask: Tensor | None, keys: CachedKeys, device: torch.device) -> Tensor:
        """Return the positions (T,), or (B, T) that do not count padding."""
        if attention_mask is not None and attention_mask.ndim == 2:
            counted = (attention_mask != 0).cumsum(dim=1) - 1
            # The values of a mask are known only when it runs.
            if self.position_embedding is not None and not torch.compiler.is_compiling():
                require_learned_positions(int(counted.max()) + 1, self.config.max_position_embeddings)
            return counted.clamp(min=0)[:, -keys.num_queries :]
        if self.position_embedding is not None and isinstance(keys.seen, int):
            require_learned_positions(keys.seen + keys.num_queries, self.config.max_position_embeddings)
        return torch.arange(keys.num_queries, device=device) + keys.seen


class TidegateForCausalLM(TidegatePreTrainedModel, GenerationMixin):
    """A decoder language model with gated attention; the counterpart of `TransformerLM` in transformers."""

    _tied_weights_keys = {"lm_head.weight": "model.embedding.weight"}  # noqa: RUF012, as transformers declares it
    accepts_loss_kwargs = True

    def __init__(self, config: TidegateConfig) -> None:
        super().__init__(config)
        self.model = TidegateModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> CausalLMOutputWithPast:
        """Return the logits (B, T, V) of the next tokens, and the loss if labels are given.

        Labels (B, T) are the tokens themselves, since they are shifted here; −100 is ignored. `logits_to_keep` is the
        number of last positions, or the positions, whose logits are returned; 0 is all. `num_items_in_batch` divides
        the sum of losses; None is the number of labels that are not ignored. The other arguments are those of
        `TidegateModel.forward`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        logits_BTV = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = cast("Any", self).loss_function(
                logits=logits_BTV,
                labels=labels,
                vocab_size=self.config.vocab_size,
                num_items_in_batch=num_items_in_batch,
            )
        return CausalLMOutputWithPast(
            loss=loss, logits=logits_BTV, past_key_values=outputs.past_key_values, hidden_states=outputs.hidden_states
        )


@contextmanager
def _block_inputs(stack: TransformerStack, states: list[Any]) -> Generator[None]:
    """Append the input of each block to `states`."""

    def note(_: nn.Module, arguments: tuple[Any, ...]) -> None:
        states.append(arguments[0])

    handles = [block.register_forward_pre_hook(note) for block in stack.blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
