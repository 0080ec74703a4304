"""Hashes by which the records show what the variants of a comparison shared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from torch import Tensor, nn

from tidegate.lab.tasks.task import Batch
from tidegate.torch.gate import AttentionGate

_LEADING = 8
"""Channels that layers of any width have."""


def weight_fingerprints(model: nn.Module) -> dict[str, str]:
    """Hash each parameter under its name and shape, and its leading channels under its name.

    Of two models, equal names and shapes have equal values if they start alike; of layers that differ in width, the
    leading channels are what they have in common. Gates at one site have nothing in common unless they are one gate.
    """
    fingerprints: dict[str, str] = {}
    for path, module in model.named_modules():
        gate = f" of {module.gate}" if isinstance(module, AttentionGate) else ""
        for name, weight in module.named_parameters(prefix=path, recurse=False):
            leading = weight[tuple(slice(_LEADING) for _ in weight.shape)]
            fingerprints[f"weights:{name}{gate} {tuple(weight.shape)}"] = _digest(_bytes(weight.detach()))
            fingerprints[f"weights:{name}{gate} leading"] = _digest(_bytes(leading.detach()))
    return fingerprints


def batches_fingerprint(batches: Iterable[Batch]) -> str:
    """Hash some batches in their order."""
    chained = ""
    for batch in batches:
        chained = chained_fingerprint(chained, batch)
    return chained


def chained_fingerprint(before: str, batch: Batch) -> str:
    """Hash a batch together with the hash of all before it, so that a run that goes on keeps one hash alone."""
    return _digest(before.encode() + _bytes(batch.inputs) + _bytes(batch.targets))


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
