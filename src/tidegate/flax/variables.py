"""Parameters as variables of NNX modules, and their partition over the devices of a mesh.

Modules and functions use the same parameter names. Heads and the inner width of feed-forward layers are sharded; a gate
is sharded like the query, so that each device holds the gates of its heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from tidegate._validation import InputError, require_bool
from tidegate.config import AttentionConfig, TransformerConfig
from tidegate.flax.attention import init_attention
from tidegate.flax.decoder import init_model
from tidegate.flax.params import Params, dotted_path, named_shapes, require_params

_SPLIT_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_SPLIT_AXES: dict[tuple[str, ...], int] = {
    **{(name, "kernel"): 1 for name in _SPLIT_OUTPUTS},
    **{(name, "bias"): 0 for name in _SPLIT_OUTPUTS},
    ("o_proj", "kernel"): 0,
    ("down_proj", "kernel"): 0,
    ("metric", "weight"): 0,
}
"""The sharded axis, by the names of a projection and its array; others are replicated."""


class SwitchedModule(nnx.Module):
    """A module with the switches `deterministic` and `decode`, for itself or one call, and a stream of dropout keys."""

    def __init__(
        self,
        *,
        dtype: jax.typing.DTypeLike | None,
        deterministic: bool | None,
        decode: bool | None,
        dropout: float,
        rngs: nnx.Rngs,
        keep_rngs: bool,
    ) -> None:
        _require_switches(deterministic=deterministic, decode=decode)
        require_bool("keep_rngs", keep_rngs)
        self.dtype = dtype
        self.deterministic = deterministic
        self.decode = decode
        self.rngs = rngs.dropout.fork() if keep_rngs and dropout > 0 else None

    # `nnx.view_info` reads the section `Args:` of this docstring.
    def set_view(self, deterministic: bool | None = None, decode: bool | None = None) -> None:
        """Set the switches; called by `nnx.view`.

        Args:
            deterministic: Turn dropout off.
            decode: Use the cache.
        """
        _require_switches(deterministic=deterministic, decode=decode)
        self.deterministic = self.deterministic if deterministic is None else deterministic
        self.decode = self.decode if decode is None else decode

    def in_dtype(self, x: Array) -> Array:
        """Convert an array to the dtype of the computation, if the module has one."""
        return x if self.dtype is None else x.astype(self.dtype)

    def decodes(self, decode: bool | None) -> bool:
        """Return whether to use the cache: the call's setting, else the module's, else False."""
        _require_switches(decode=decode)
        return bool(self.decode if decode is None else decode)

    def dropout_key(
        self, rate: float, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None
    ) -> Array | None:
        """Return a key for dropout at this rate, or None if dropout is off."""
        _require_switches(deterministic=deterministic)
        if rate == 0:
            return None
        deterministic = self.deterministic if deterministic is None else deterministic
        if deterministic is None:
            hint = "Give it to the module or to the call, or use train() or eval()."
            raise InputError("deterministic", expected=f"True or False with dropout {rate}", got=None, hint=hint)
        if deterministic:
            return None
        given = rngs.dropout if isinstance(rngs, nnx.Rngs) else rngs
        stream = self.rngs if given is None else given
        if stream is None:
            raise InputError("rngs", expected="given in calls of a module with keep_rngs=False", got=None)
        return stream()


def _require_switches(**switches: bool | None) -> None:
    for name, value in switches.items():
        require_bool(name, value, optional=True)


def check_or_draw(params: Params | None, draw: Callable[[], Params]) -> Params:
    """Return the given parameters after checking their shapes; draw them if None."""
    if params is None:
        return draw()
    require_params(params, named_shapes(jax.eval_shape(draw)))
    return params


def as_variables(params: Params, *, axis: str | None) -> nnx.Dict[Any]:
    """Convert nested dictionaries of arrays to modules of `nnx.Param`, with heads sharded over a mesh axis, if any."""
    if axis is None:
        return _nest(jax.tree.map(nnx.Param, params))
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if axis not in kinds:
        hint = "Build the module under jax.set_mesh(mesh)."
        raise InputError("mesh_axis", expected=f"one of the mesh axes {mesh.axis_names}", got=axis, hint=hint)
    if kinds[axis] != AxisType.Auto:
        hint = f"Make the mesh with jax.make_mesh(..., axis_types=(jax.sharding.AxisType.Auto,) * {len(kinds)})."
        raise InputError("mesh_axis", expected="an axis of type Auto", got=f"{axis}: {kinds[axis].name}", hint=hint)

    def place(array: Array, spec: PartitionSpec) -> nnx.Param[Array]:
        # The variable would not move arrays from outside the mesh, which are on one device.
        return nnx.Param(jax.device_put(array, spec), out_sharding=spec)

    return _nest(jax.tree.map(place, params, specs_for(params, axis=axis)))


def plain_params(module: nnx.Module) -> Params:
    """Return the parameters of a module as the pytree that the functions take, as from `init_model`."""
    return {name: _plain(part) for name, part in vars(module).items() if isinstance(part, nnx.Param | nnx.Module)}


def _nest(tree: Mapping[str, Any]) -> nnx.Dict[Any]:
    return nnx.Dict({name: _nest(part) if isinstance(part, Mapping) else part for name, part in tree.items()})


def _plain(part: nnx.Param[Any] | nnx.Module) -> Any:
    if isinstance(part, nnx.Param):
        return part[...]
    return [_plain(item) for item in part] if isinstance(part, nnx.List) else plain_params(part)


def partition_specs(config: AttentionConfig | TransformerConfig, *, axis: str = "model") -> Params:
    """Return a `PartitionSpec` for each parameter of a layer or a model, in a pytree like theirs.

    The size of the mesh axis `axis` must divide the numbers of query and key/value heads. A single key/value head, a
    gate shared by all heads, a gate at the dense site, embeddings, norms and a model's head are replicated.
    """
    key = jax.random.key(0)
    if isinstance(config, AttentionConfig):
        return specs_for(jax.eval_shape(lambda: init_attention(key, config)), axis=axis)
    return specs_for(jax.eval_shape(lambda: init_model(key, config)), axis=axis)


def specs_for(params: Params, *, axis: str) -> Params:
    """Return the same for given parameters or their shapes; the blocks must not be stacked."""

    def spec(path: tuple[Any, ...], array: jax.ShapeDtypeStruct) -> PartitionSpec:
        names = dotted_path(path).split(".")
        split = 0 if "attn_gate" in names else _SPLIT_AXES.get(tuple(names[-2:]))
        if split is None or array.shape[split] == 1:
            return PartitionSpec()
        return PartitionSpec(*(axis if place == split else None for place in range(len(array.shape))))

    return jax.tree_util.tree_map_with_path(spec, params)
