"""A vision transformer of gated attention.

Legend: B batch, C channels, H height, W width, P patch size, N patches, T positions, M model width, K classes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tidegate._validation import InputError
from tidegate.config import VisionConfig
from tidegate.torch.attention import AttentionTrace, Traces
from tidegate.torch.block import TransformerStack
from tidegate.torch.initialize import initialize
from tidegate.torch.precision import require_dtype


class VisionTransformer(nn.Module):
    """A vision transformer: it maps images to the logits of their classes."""

    def __init__(
        self, config: VisionConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        patch_width = config.channels * config.patch_size**2
        self.patch_embedding = nn.Linear(patch_width, config.d_model, device=device, dtype=dtype)
        # A class token is a position without a patch: its embedding is the first row.
        self.position_embedding = nn.Embedding(config.num_tokens, config.d_model, device=device, dtype=dtype)
        self.stack = TransformerStack(config, device=device, dtype=dtype)
        self.head = nn.Linear(config.d_model, config.num_classes, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self, seed: int | None = None) -> None:
        """Initialize all weights; with a seed, variants share the weights that they have in common."""
        initialize(self, init=self.config.init, seed=seed)

    def forward(self, images: Tensor, *, traces: Traces | None = None) -> Tensor:
        """Return the logits (B, K) of images (B, C, H, W) of the configured size; see `trace` for `traces`."""
        channels, size = self.config.channels, self.config.image_size
        if images.ndim != 4 or images.shape[1:] != (channels, size, size):
            expected = f"of shape (batch, {channels}, {size}, {size})"
            raise InputError("images", expected=expected, got=tuple(images.shape))
        try:
            x_BTM = self.patch_embedding(self._patches(images))
        except (RuntimeError, TypeError):
            require_dtype(self.patch_embedding.weight.dtype, images=images)
            raise
        by_class_token = self.config.pooling == "class"
        if by_class_token:
            x_BTM = F.pad(x_BTM, (0, 0, 1, 0))
        x_BTM = self.stack(x_BTM + self.position_embedding.weight, traces=traces)
        return self.head(x_BTM[:, 0] if by_class_token else x_BTM.mean(dim=1))

    if TYPE_CHECKING:
        __call__ = forward

    def trace(self, images: Tensor) -> tuple[Tensor, list[AttentionTrace]]:
        """Return the logits, and the trace of each block."""
        traces = Traces()
        return self(images, traces=traces), traces

    def num_parameters(self, *, embeddings: bool = True) -> int:
        """Return the number of parameters, with or without the embeddings of patches and positions."""
        parts = () if embeddings else (self.patch_embedding, self.position_embedding)
        left_out = sum(parameter.numel() for part in parts for parameter in part.parameters())
        return sum(parameter.numel() for parameter in self.parameters()) - left_out

    def flops_per_token(self) -> float:
        """Return the FLOPs of an image's forward pass divided by its `config.num_tokens` positions.

        A training step takes three times as many.
        """
        config = self.config
        per_image = 2 * config.num_patches * self.patch_embedding.weight.numel() + 2 * self.head.weight.numel()
        return self.stack.flops_per_token(config.num_tokens) + per_image / config.num_tokens

    def _patches(self, images_BCHW: Tensor) -> Tensor:
        """Return (B, N, C P P): patches row by row, each flattened channel by channel, row by row."""
        size = self.config.patch_size
        tiles = images_BCHW.unflatten(3, (-1, size)).unflatten(2, (-1, size))
        return tiles.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
