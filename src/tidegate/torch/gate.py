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
    """The inputs of gates, raw: before other gates, norms and rotation. None is an input that no gate reads."""

    input: Tensor
    """(B, T, M): the layer's input."""
    context: Tensor | None = None
    """(B, S, M): the source of keys and values; None is the input itself, as in self-attention."""
    query: Tensor | None = None
    """(B, T, H, D)"""
    value: Tensor | None = None
    """(B, S, G, D)"""
    output: Tensor | None = None
    """(B, T, H, D): the attention output, with a sink in the softmax."""
    partition: Tensor | None = None
    """(B, T, H): the logarithm of the partition function of the keys."""
    traced: dict[str, Tensor] | None = None
    """Receives the values of each gate, by path, for a trace."""


class ChannelShare(Protocol):
    """The part of one of several processes in a gate, see `tidegate.torch.parallel`."""

    def own_part(self, source: Tensor) -> Tensor:
        """Return the channels of a gate's input that this process has."""
        ...

    def add_up(self, logits: Tensor) -> Tensor:
        """Return the sum of the logits of all processes."""
        ...


class AttentionGate(nn.Module):
    """One gate of an attention layer, `activation(reads W + b)`; the logits are float32 or better.

    Its parameters are `weight`, (matrices, R, D), or `weight_down` and `weight_up` for a rank, and `bias`. A gate that
    reads the partition function has no matrix: it is a sink, which the layer passes to the kernel as `sink_logits`.
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
        self.share: ChannelShare | None = None
        """The channels that this process reads if several processes share the gate; None reads all."""
        shapes = gate.parameter_shapes(**asdict(shape))
        self._matrix_names = tuple(name for name in shapes if name != "bias")
        for name, size in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(size, device=device, dtype=dtype)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the matrix from N(0, init_std²) and the bias with its starting value.

        With a rank r, `weight_down` is drawn from N(0, 1/r), so that the product has standard deviation init_std and a
        gate with init_std 0 still learns.
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
        """Return the gate's input: (B, T, R), the same for all heads, or by matrix as `_product` takes it."""
        source = reads.context if self.gate.on_source and reads.context is not None else reads.input
        if self.gate.is_input_independent:
            return source[..., :0]
        match self.gate.reads:
            case "input":
                pass
            case "query":
                assert reads.query is not None
                # The heads of a group are adjacent, so that a group's queries are a view.
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
                raise AssertionError("a gate that reads nothing is input-independent")
        if self.gate.placebo == "shuffled":
            source = source.detach().roll(-1, dims=0)
        source = source if self.gate.width is None else source[..., : self.gate.width]
        return source if self.share is None else self.share.own_part(source)

    def forward(self, source: Tensor) -> Tensor:
        """Return the gate's values (B, T, H, D), D = 1 for the grain `head`; at the dense site (B, T, M)."""
        values = activate(self.gate.activation, self.logits(source))
        return values.squeeze(-2) if self.gate.site == "dense" else values

    def logits(self, source: Tensor) -> Tensor:
        """Return the logits (B, T, H, D) in float32 or better for every dtype, also under autocast."""
        if is_under_autocast(source):
            with without_autocast(source):
                return self.logits(source)
        logits = widen(source)
        if self.gate.is_input_independent:
            size = (*source.shape[:2], self.num_matrices, self.gate.gated_width(self.shape))
            logits = widen(source.new_zeros(())).expand(size)
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

    def combine(self, target: Tensor, values: Tensor) -> Tensor:
        """Apply the gate's values to the target, (B, T, H, D) or at the dense site (B, T, M), and keep its dtype."""
        match self.gate.op:
            case "replace":
                gated = values
            case "multiply":
                gated = target * values
            case "add":
                gated = target + values
        return gated if gated.dtype == target.dtype else gated.to(target.dtype)

    def sink_logits(self) -> Tensor:
        """Return the logit (H,) of each head's sink, the negative bias of a gate that reads the partition function."""
        if self.gate.bias is None:
            return torch.zeros(self.num_heads)
        return -self._parameter("bias").squeeze(-1)

    def matrices(self) -> list[Tensor]:
        """Return the matrices in the order of the products: `weight`, or `weight_down` and `weight_up`."""
        return [self._parameter(name) for name in self._matrix_names]

    @property
    def num_products(self) -> int:
        """Return the multiplications of inputs and weights at one position; heads that share a matrix each use it."""
        times = 1 if self.gate.reads == "input" else self.num_heads // self.gate.num_matrices(self.shape)
        return times * sum(weight.numel() for weight in self.matrices())

    def extra_repr(self) -> str:
        """Return the gate's spelling."""
        return str(self.gate)

    def _by_matrix(self, source: Tensor) -> Tensor:
        """Return (B, T, matrices, R), or (B, T, matrices, heads of each, R) where heads share a matrix."""
        batch, positions, heads, width = source.shape
        if heads == self.num_matrices:
            return source
        merged = heads // self.num_heads * width
        sharing = () if self.num_heads == self.num_matrices else (self.num_heads // self.num_matrices,)
        return source.reshape(batch, positions, self.num_matrices, *sharing, merged)

    def _parameter(self, name: str) -> Tensor:
        # `get_parameter` would reject the plain tensors of `torch.func.functional_call`.
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
        """Return the gate at a site, or the sink at `partition`, if any."""
        module = self._modules.get(path)
        assert module is None or isinstance(module, AttentionGate)
        return module


def gate_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yield every parameter of a gate, found by type and not by name, as for an optimizer group of their own."""
    for module in model.modules():
        if isinstance(module, AttentionGate):
            yield from module.parameters()


def activate(activation: Activation, logits: Tensor) -> Tensor:
    """Return the activation as `tidegate.tensors.activate` defines it, with PyTorch's own kernels."""
    match activation:
        case "sigmoid":
            return logits.sigmoid()
        case "silu":
            return silu(logits)
        case "softplus":
            # Above its threshold PyTorch's softplus is the identity; at 50 the difference is below float64's rounding.
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
    """Repeat each head of (B, T, heads, D) in place, so that there are `num_heads`."""
    heads = x.shape[-2]
    if heads == num_heads:
        return x
    return x.unsqueeze(-2).expand(*x.shape[:-1], num_heads // heads, -1).flatten(-3, -2)


def _product(reads: Tensor, weight: Tensor) -> Tensor:
    """Multiply a gate's input by (matrices, R, D).

    (B, T, R) and (B, T, matrices, R) give (B, T, matrices, D); (B, T, matrices, heads of each, R) gives
    (B, T, matrices, heads of each, D).
    """
    batch, positions, *heads, width = reads.shape
    matrices, _, gated_width = weight.shape
    if heads:
        rows = reads.movedim(2, 0).reshape(matrices, batch * positions * math.prod(heads[1:]), width)
        return torch.bmm(rows, weight).view(matrices, batch, positions, *heads[1:], gated_width).movedim(0, 2)
    if positions == 1:
        # Joining the matrices copies them, which takes longer than the products of one position.
        return torch.bmm(reads.squeeze(1).expand(matrices, -1, -1), weight).transpose(0, 1).unsqueeze(1)
    flat = torch.matmul(reads, weight.transpose(0, 1).flatten(1))
    return flat.view(batch, positions, matrices, gated_width)
