"""Gates as PyTorch modules.

Legend: B batch, T positions, H heads at the gated site, M model width, R read width, D gated width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tidegate.gate import Activation, Gate, GatePath
from tidegate.gates import Gates
from tidegate.sizes import HeadShape
from tidegate.torch.kernel import silu
from tidegate.torch.precision import is_under_autocast, widen, without_autocast


@dataclass(kw_only=True, slots=True)
class GateReads:
    """All that a gate may read, raw: before other gates, norms and rotation. None is what no gate reads."""

    input: Tensor
    """(B, T, M): the layer's input."""
    context: Tensor | None = None
    """(B, S, M): what is attended to; None is the input itself, as in self-attention."""
    query: Tensor | None = None
    """(B, T, H, D)"""
    value: Tensor | None = None
    """(B, S, G, D)"""
    output: Tensor | None = None
    """(B, T, H, D): the attention output, once it is there, a sink in its softmax included."""
    partition: Tensor | None = None
    """(B, T, H): the logarithm of the partition function of the keys, for a trace."""


class ChannelShare(Protocol):
    """What one of several processes does for a gate that they share, see `tidegate.torch.parallel`."""

    def own_part(self, source: Tensor) -> Tensor:
        """The channels of what is read that this process has."""
        ...

    def add_up(self, logits: Tensor) -> Tensor:
        """The sum of what the processes have made of their channels."""
        ...


class AttentionGate(nn.Module):
    """One gate of an attention layer, `activation(reads W + b)`; the logits are float32 or better.

    Its parameters are `weight`, (matrices, R, D), or `weight_down` and `weight_up` for a rank, and `bias`. One that
    reads the partition function has no matrix: it is a sink, which the layer hands to the kernel as `sink_logits`.
    """

    def __init__(
        self,
        gate: Gate,
        shape: HeadShape,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.shape = shape
        self.num_heads = gate.num_heads_at_site(shape)
        self.num_matrices = gate.num_matrices(shape)
        self._matrix_names = _matrix_names(gate)
        self.share: ChannelShare | None = None
        """Which of the channels it reads here, where several processes share them out; None reads all."""
        for name, size in gate.parameter_shapes(**asdict(shape)).items():
            self.register_parameter(name, nn.Parameter(torch.empty(size, device=device, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start anew: the matrix from N(0, init_std²), the bias at its starting value.

        With a rank r, `weight_down` is drawn from N(0, 1/r), so that the product has deviation init_std and a gate
        that starts at zero still learns.
        """
        for name, parameter in self.named_parameters():
            match name:
                case "bias":
                    nn.init.constant_(parameter, self.gate.bias or 0.0)
                case "weight_down":
                    nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
                case _:
                    nn.init.normal_(parameter, std=self.gate.init_std)

    def source(self, reads: GateReads) -> Tensor:
        """Return what the gate reads: (B, T, R), the same for all heads, or by matrix as `_product` takes it."""
        source = reads.context if self.gate.on_source and reads.context is not None else reads.input
        if self.gate.is_input_independent:
            return source[..., :0]
        match self.gate.reads:
            case "input":
                pass
            case "query":
                assert reads.query is not None
                # The heads of a group stand side by side, so that a group's queries are a view.
                source = self._by_matrix(reads.query)
            case "value":
                assert reads.value is not None
                source = self._by_matrix(repeat_heads(reads.value, self.num_heads))
            case "output":
                assert reads.output is not None
                dense = self.gate.site == "dense"
                source = reads.output.flatten(-2) if dense else self._by_matrix(reads.output)
            case "partition":
                assert reads.partition is not None
                source = reads.partition.unsqueeze(-1)
            case "nothing":
                raise AssertionError("a gate that reads nothing is blind")
        if self.gate.placebo == "shuffled":
            source = source.detach().roll(-1, dims=0)
        source = source if self.gate.width is None else source[..., : self.gate.width]
        return source if self.share is None else self.share.own_part(source)

    def forward(self, source: Tensor) -> Tensor:
        """The gate's values (B, T, H, D), D = 1 for the grain `head`; at the dense site (B, T, M)."""
        values = activate(self.gate.activation, self.logits(source))
        return values.squeeze(-2) if self.gate.site == "dense" else values

    def logits(self, source: Tensor) -> Tensor:
        """(B, T, H, D), in float32 or better whatever the layer's dtype, under autocast too."""
        if is_under_autocast(source):
            with without_autocast(source):
                return self.logits(source)
        logits = self._blank_logits(source) if self.gate.is_input_independent else widen(source)
        for name in self._matrix_names:
            logits = _product(logits, widen(self._parameter(name)))
            if self.share is not None and name == self._matrix_names[0]:
                logits = self.share.add_up(logits)
        if self.gate.has_bias:
            bias = widen(self._parameter("bias"))
            logits = logits + (bias if logits.ndim == 4 else bias[:, None, :])
        elif self.gate.bias:
            logits = logits + self.gate.bias
        if logits.ndim == 5:
            return logits.flatten(2, 3)
        return logits if self.num_matrices == self.num_heads else repeat_heads(logits, self.num_heads)

    def apply_to(self, target: Tensor, source: Tensor) -> Tensor:
        """Return the target (B, T, H, D), or (B, T, M) at the dense site, under this gate; of the target's dtype."""
        return self.combine(target, self(source))

    def combine(self, target: Tensor, values: Tensor) -> Tensor:
        """Return the target under the gate's values; of the target's dtype."""
        match self.gate.op:
            case "replace":
                gated = values
            case "multiply":
                gated = target * values
            case "add":
                gated = target + values
        return gated if gated.dtype == target.dtype else gated.to(target.dtype)

    def sink_logits(self) -> Tensor:
        """(H,): the logit of each head's sink, the negative bias of a gate that reads the partition function."""
        if self.gate.bias is None:
            return torch.zeros(self.num_heads)
        return -self._parameter("bias").squeeze(-1)

    def matrices(self) -> list[Tensor]:
        """What the reads pass through, one after the other: `weight`, or `weight_down` and `weight_up`."""
        return [self._parameter(name) for name in self._matrix_names]

    @property
    def num_products(self) -> int:
        """Products of a number read and a number learned at one position; heads that share a matrix each use it."""
        times = 1 if self.gate.reads == "input" else self.num_heads // self.gate.num_matrices(self.shape)
        return times * sum(weight.numel() for weight in self.matrices())

    def extra_repr(self) -> str:
        """The gate as it is spelled."""
        return str(self.gate)

    def _blank_logits(self, source: Tensor) -> Tensor:
        """(B, T, matrices, D) of zeros, at the positions of the source."""
        width = self.gate.gated_width(self.shape)
        return widen(source.new_zeros(())).expand(*source.shape[:2], self.num_matrices, width)

    def _by_matrix(self, source: Tensor) -> Tensor:
        """(B, T, matrices, R), or (B, T, matrices, heads of each, R) where heads share a matrix."""
        batch, positions, heads, width = source.shape
        if heads == self.num_matrices:
            return source
        merged = heads // self.num_heads * width
        sharing = () if self.num_heads == self.num_matrices else (self.num_heads // self.num_matrices,)
        return source.reshape(batch, positions, self.num_matrices, *sharing, merged)

    def _parameter(self, name: str) -> Tensor:
        # Not `get_parameter`, which refuses the plain tensors of `torch.func.functional_call`.
        return getattr(self, name)


class AttentionGates(nn.Module):
    """The gates of one layer, each under its path: its site, or `partition`."""

    def __init__(
        self,
        gates: Gates,
        shape: HeadShape,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for gate in gates:
            self.add_module(gate.path, AttentionGate(gate, shape, device=device, dtype=dtype))

    def at(self, path: GatePath) -> AttentionGate | None:
        """The gate at a site, or the sink at `partition`, if there is one."""
        module = self._modules.get(path)
        assert module is None or isinstance(module, AttentionGate)
        return module


def gate_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Every parameter that belongs to a gate, found by type and not by name: for an optimiser group of their own."""
    for module in model.modules():
        if isinstance(module, AttentionGate):
            yield from module.parameters()


def activate(activation: Activation, logits: Tensor) -> Tensor:
    """Return the activation as `tidegate.tensors.activate` defines it, by PyTorch's own kernels."""
    match activation:
        case "sigmoid":
            return logits.sigmoid()
        case "silu":
            return silu(logits)
        case "softplus":
            # Past its threshold PyTorch's softplus is the identity; at 50 the two agree to float64's rounding.
            return F.softplus(logits, threshold=50.0)
        case "tanh1":
            return 1 + logits.tanh()
        case "twosigmoid":
            return 2 * logits.sigmoid()
        case "identity":
            return logits
        case "gelu":
            return F.gelu(logits)
        case "tanh":
            return logits.tanh()


def repeat_heads(x: Tensor, num_heads: int) -> Tensor:
    """Each head of (B, T, heads, D) repeated in place until there are `num_heads`."""
    heads = x.shape[-2]
    if heads == num_heads:
        return x
    return x.unsqueeze(-2).expand(*x.shape[:-1], num_heads // heads, -1).flatten(-3, -2)


def _matrix_names(gate: Gate) -> tuple[str, ...]:
    if not gate.has_matrix:
        return ()
    return ("weight",) if gate.rank is None else ("weight_down", "weight_up")


def _product(reads: Tensor, weight: Tensor) -> Tensor:
    """Reads through (matrices, R, D).

    (B, T, R) gives (B, T, matrices, D), and so does (B, T, matrices, R); (B, T, matrices, heads of each, R) gives
    (B, T, matrices, heads of each, D).
    """
    batch, positions, *heads, width = reads.shape
    matrices, _, gated_width = weight.shape
    if positions == 1 and not heads:
        # One position: batch over matrices directly; joining them would cost more than the products.
        return torch.bmm(reads.squeeze(1).expand(matrices, -1, -1), weight).transpose(0, 1).unsqueeze(1)
    if positions == 1 and batch == 1:
        return torch.bmm(reads.reshape(matrices, -1, width), weight).view(1, 1, matrices, *heads[1:], gated_width)
    if not heads:
        flat = torch.matmul(reads, weight.transpose(0, 1).flatten(1))
        return flat.view(batch, positions, matrices, gated_width)
    rows = reads.movedim(2, 0).reshape(matrices, batch * positions * math.prod(heads[1:]), width)
    return torch.bmm(rows, weight).view(matrices, batch, positions, *heads[1:], gated_width).movedim(0, 2)
