"""Check the header of a model file before the model is built, for every framework."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace

from tidegate._files import StrPath, TensorFormat, path_error, read_tensor_header, require_shapes
from tidegate._text import short_repr, shorten
from tidegate._validation import InputError
from tidegate.config import StackConfig, TransformerConfig, VisionConfig

Shapes = Mapping[str, tuple[int, ...]]

_CONFIGS: dict[str, type[StackConfig]] = {"TransformerLM": TransformerConfig, "VisionTransformer": VisionConfig}
_BLOCK = re.compile(r"stack\.blocks\.(\d+)\.")
_FLOATS = ("F64", "F32", "F16", "BF16")
_FITTING = "a file whose tensors match its configuration"


def model_format(writer: str) -> TensorFormat:
    """Return the format of model files; `writer` is the function that writes them in this framework."""
    return TensorFormat(
        name="tidegate", version="2", keys=frozenset(("model", "config")), holds="Tidegate model", writer=writer
    )


def read_model_config(
    path: StrPath, *, kinds: Iterable[str], writer: str, shapes_of: Callable[[StackConfig], Shapes]
) -> StackConfig:
    """Check the tensors of a model file against its configuration, and return the configuration.

    The work is bounded by the size of the file, not by the sizes that it declares. `kinds` are the supported classes,
    `writer` is the function that writes such files. `shapes_of` returns the names and shapes of all tensors of a model,
    without allocating them; it is called for models of a single block.

    Raises:
        InputError: The file holds another model, or its configuration is invalid or does not fit its tensors.
        ValueError: It is not a model file, it is damaged, or names or shapes of its tensors differ.
    """
    header = read_tensor_header(path, model_format(writer))
    kind, kinds = header.metadata["model"], tuple(kinds)
    if kind not in kinds:
        raise path_error(path, f"a file of {' or '.join(kinds)}", f"It holds a model {short_repr(kind)}.")
    try:
        config = _CONFIGS[kind].from_json(header.metadata["config"])
    except InputError as problem:
        hint = f"Its configuration cannot be read: {shorten(str(problem))}"
        raise path_error(path, "a file with a valid configuration", hint) from None
    for name, dtype in header.dtypes.items():
        if dtype not in _FLOATS:
            hint = f"It has the tensor {shorten(name)} of the type {shorten(dtype)}."
            raise path_error(path, f"a file of tensors of {', '.join(_FLOATS)}", hint)
    _require_sizes(path, config, header.shapes)
    try:
        expected = _expected_shapes(config, shapes_of)
    except (RuntimeError, TypeError, OverflowError) as problem:
        raise path_error(path, _FITTING, f"Invalid model dimensions: {shorten(str(problem))}") from None
    require_shapes(header.shapes, expected, complaint=f"{path} does not match its own configuration")
    return config


def _require_sizes(path: StrPath, config: StackConfig, shapes: Shapes) -> None:
    """Raise InputError for more blocks than the file has, and for sizes that no tensor in it could have."""
    num_blocks = len({match[1] for name in shapes if (match := _BLOCK.match(name)) is not None})
    if config.num_layers != num_blocks:
        hint = f"num_layers is {config.num_layers:,}, and it has tensors of {num_blocks:,} blocks."
        raise path_error(path, _FITTING, hint)
    largest = max(map(math.prod, shapes.values()))
    for name, size in _declared_sizes(config).items():
        if size > largest:
            hint = f"{name} is {size:,}, and its largest tensor has {largest:,} numbers."
            raise path_error(path, _FITTING, hint)


def _declared_sizes(config: StackConfig) -> dict[str, int]:
    """Return the sizes that are dimensions of tensors, so that none is larger than the largest tensor."""
    sizes = {option.name: getattr(config, option.name) for option in fields(config)}
    # These are not dimensions of tensors.
    del sizes["num_layers"]
    if isinstance(config, TransformerConfig):
        del sizes["window"]
        if config.positions != "learned":
            del sizes["max_length"]
    if isinstance(config.d_ff, tuple):
        sizes["d_ff"] = max(config.d_ff)
    for gate in config.gates:
        sizes |= {f"rank of {gate}": gate.rank, f"width of {gate}": gate.width}
    return {name: size for name, size in sizes.items() if type(size) is int}


def _expected_shapes(config: StackConfig, shapes_of: Callable[[StackConfig], Shapes]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors; blocks of the same feed-forward width have the same shapes."""
    widths = config.d_ff if isinstance(config.d_ff, tuple) else (config.d_ff,) * config.num_layers
    single = {width: shapes_of(replace(config, num_layers=1, d_ff=width)) for width in dict.fromkeys(widths)}
    return {
        _BLOCK.sub(f"stack.blocks.{index}.", name, count=1): shape
        for index, width in enumerate(widths)
        for name, shape in single[width].items()
    }
