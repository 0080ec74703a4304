"""Save and load models as one safetensors file, with the configuration inside, for PyTorch and JAX alike.

The file has PyTorch's names and layouts; the tables here map them to those of JAX.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from safetensors import SafetensorError, safe_open
from safetensors.flax import save_file

from tidegate._files import require_shapes, write_tensors
from tidegate._model_files import Shapes, model_format, read_model_config
from tidegate._validation import InputError
from tidegate.config import StackConfig, TransformerConfig
from tidegate.flax.block import unstack_layers
from tidegate.flax.decoder import init_model
from tidegate.flax.params import Params, dotted_path, named_shapes, require_params
from tidegate.gate import GATE_PATHS

Layout: TypeAlias = Literal["same", "flat", "inward", "outward"]


class TorchName(NamedTuple):
    """The name and layout of a parameter in PyTorch."""

    name: str
    layout: Layout
    """`same`; `flat`: all axes as one; `inward` (M, ...) and `outward` (..., M): a matrix, outputs first."""


def _projection(name: str, layout: Layout = "inward", *, bias: Layout = "same") -> dict[str, TorchName]:
    return {f"{name}.kernel": TorchName(f"{name}.weight", layout), f"{name}.bias": TorchName(f"{name}.bias", bias)}


def _norm(name: str) -> dict[str, TorchName]:
    return {f"{name}.scale": TorchName(f"{name}.weight", "same"), f"{name}.bias": TorchName(f"{name}.bias", "same")}


MODEL_NAMES: dict[str, TorchName] = {
    "embedding.embedding": TorchName("embedding.weight", "same"),
    "position_embedding.embedding": TorchName("position_embedding.weight", "same"),
    "head.kernel": TorchName("head.weight", "inward"),
    **_norm("stack.norm"),
}
"""PyTorch's name of each parameter outside the blocks."""

BLOCK_NAMES: dict[str, TorchName] = {
    **_norm("attention_norm"),
    **_projection("attention.q_proj", bias="flat"),
    **_projection("attention.k_proj", bias="flat"),
    **_projection("attention.v_proj", bias="flat"),
    **_projection("attention.o_proj", "outward"),
    "attention.q_norm.scale": TorchName("attention.q_norm.weight", "same"),
    "attention.k_norm.scale": TorchName("attention.k_norm.weight", "same"),
    "attention.metric.weight": TorchName("attention.metric.weight", "same"),
    **{
        f"attention.attn_gate.{path}.{name}": TorchName(f"attention.attn_gate.{path}.{name}", "same")
        for path in GATE_PATHS
        for name in ("weight", "weight_down", "weight_up", "bias")
    },
    **_norm("feedforward_norm"),
    **_projection("feedforward.gate_proj"),
    **_projection("feedforward.up_proj"),
    **_projection("feedforward.down_proj"),
}
"""PyTorch's name of each parameter of a block, without the prefix `stack.blocks.<i>.`."""

_KIND = "TransformerLM"
_BLOCK = re.compile(r"(stack\.blocks\.\d+\.)?(.*)")


def save_params(path: str | Path, params: Params, config: TransformerConfig) -> None:
    """Write parameters, configuration, version and a checksum into one safetensors file, atomically.

    `tidegate.torch.load_model` reads it as well.
    """
    arrays = to_torch(params, config)
    write_tensors(
        path,
        lambda file, metadata: save_file(arrays, file, metadata=metadata),
        model_format("save_params"),
        {"model": _KIND, "config": config.to_json()},
        num_bytes=sum(array.nbytes for array in arrays.values()),
    )


def load_params(path: str | Path, *, dtype: jax.typing.DTypeLike | None = None) -> tuple[TransformerConfig, Params]:
    """Return the configuration and parameters from a file of `save_params` or `tidegate.torch.save_model`.

    Raise InputError before building anything if the file is damaged, even by one bit, or if its tensors do not fit its
    configuration. `dtype` None keeps that of the file.
    """
    config = read_model_config(path, kinds=(_KIND,), writer="save_params", shapes_of=_torch_shapes)
    assert isinstance(config, TransformerConfig)
    try:
        with safe_open(path, framework="flax") as file:
            state = {name: file.get_tensor(name) for name in sorted(file.keys())}
    except SafetensorError as error:
        raise InputError("path", expected="a safetensors file", got=path, hint=f"{error}.") from error
    params = _from_torch(state, config, f"{path} does not fit its own configuration")
    return config, params if dtype is None else jax.tree.map(operator.methodcaller("astype", dtype), params)


def to_torch(params: Params, config: TransformerConfig) -> dict[str, Array]:
    """Return the state dict of PyTorch's `TransformerLM`, as JAX arrays, from parameters of `init_model`."""
    if isinstance(params["stack"]["blocks"], Mapping):
        params = params | {"stack": params["stack"] | {"blocks": unstack_layers(params["stack"]["blocks"])}}
    require_params(params, named_shapes(_skeleton(config)))
    named = ((_torch_name(dotted_path(path)), array) for path, array in jax.tree_util.tree_leaves_with_path(params))
    return {name: _to_layout(array, layout) for (name, layout), array in named}


def from_torch(state: Mapping[str, Any], config: TransformerConfig) -> Params:
    """Undo `to_torch`: return parameters from a state dict of JAX, NumPy or PyTorch arrays, which are copied."""
    return _from_torch(state, config, "state does not fit the configuration")


def _from_torch(state: Mapping[str, Any], config: TransformerConfig, complaint: str) -> Params:
    given = {name: tuple(array.shape) for name, array in state.items()}
    require_shapes(given, _torch_shapes(config), complaint=complaint)

    def take(path: tuple[Any, ...], wanted: jax.ShapeDtypeStruct) -> Array:
        name, layout = _torch_name(dotted_path(path))
        given = state[name]
        # NumPy has no bfloat16: convert through DLPack, and copy so the arrays share no memory.
        shared = jnp.from_dlpack(given) if hasattr(given, "__dlpack__") and not isinstance(given, Array) else given
        array = jnp.array(shared, copy=True)
        return (array.T if layout in ("inward", "outward") else array).reshape(wanted.shape)

    return jax.tree_util.tree_map_with_path(take, _skeleton(config))


def _skeleton(config: TransformerConfig) -> Params:
    """Return the shapes of all parameters."""
    return jax.eval_shape(lambda: init_model(jax.random.key(0), config))


def _torch_shapes(config: StackConfig) -> Shapes:
    """Return the shapes of all parameters under PyTorch's names and in its layouts."""
    assert isinstance(config, TransformerConfig)
    rows = ((_torch_name(name), shape) for name, shape in named_shapes(_skeleton(config)).items())
    return {name: _torch_shape(shape, layout) for (name, layout), shape in rows}


def _torch_name(name: str) -> TorchName:
    match = _BLOCK.fullmatch(name)
    assert match is not None
    block, rest = match[1] or "", match[2]
    row = (BLOCK_NAMES if block else MODEL_NAMES)[rest]
    return TorchName(f"{block}{row.name}", row.layout)


def _torch_shape(shape: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    match layout:
        case "same":
            return shape
        case "flat":
            return (math.prod(shape),)
        case "inward":
            return (math.prod(shape[1:]), shape[0])
        case "outward":
            return (shape[-1], math.prod(shape[:-1]))


def _to_layout(array: Array, layout: Layout) -> Array:
    shape = _torch_shape(array.shape, layout)
    return array.reshape(shape[::-1]).T if layout in ("inward", "outward") else array.reshape(shape)
