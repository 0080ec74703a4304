"""Hugging Face models from a folder, whoever made it: nothing is unpickled, executed or fetched.

A model's configuration and tensors are read here, and transformers is given those and not the folder: nothing in it can
send transformers elsewhere, to adapters, to code, to pickles or to files outside. The tokenizer is read by transformers
from the folder; file names in its configuration that lead elsewhere are refused before. Time and memory are bounded by
the size of the files:

- An option that counts layers or labels may be at most 4,096 or the number of tensors in the files, since configuration
  classes make lists of that length.
- The model is built on the meta device. Building stops when it has more than 16 modules and parameters per tensor, 16
  numbers per byte of the files, or more bytes of buffers than the files have; small models get a fixed allowance.

What passes is compared tensor by tensor. Tensors that are missing or of another shape are refused by name: transformers
would fill them with random numbers.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tidegate._files import irregular_kind
from tidegate._text import echo, list_some, shorten
from tidegate.lab.tasks.documents import read_json

_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_FILE_LISTS = (
    (_CONFIG, "configuration_files"),
    (_TOKENIZER_CONFIG, "fast_tokenizer_files"),
    (_TOKENIZER_CONFIG, "init_inputs"),
)
"""Options by which a folder tells transformers what else to open, when it reads a tokenizer."""

_COUNTS = re.compile(r"(?:^|_)(?:layers|labels|n_layer|num_layer)$|^attention_types$")
"""Names of options that configuration classes make lists of, such as `num_hidden_layers`, `n_layer` and `num_labels`.

`attention_types` of GPT-Neo is a list of names and of how often each is to be repeated.
"""
_MOST_COUNTED = 4096
_MOST_PER_TENSOR_OR_BYTE = 16
_EXTRA_MODULES = 2_000
_EXTRA_NUMBERS = 1 << 22
_EXTRA_BUFFER_BYTES = 1 << 26


class _ConfigError(ValueError):
    """A configuration that is refused here, in words; what transformers raises about one is put into words."""


class Pretrained(NamedTuple):
    """A model, and the tensors of its files that its class does not know."""

    model: Any
    unread: tuple[str, ...]


def load_from_folder(folder: Path, *, attention: str | None, dtype: torch.dtype | None) -> Pretrained:
    """Load the language model of a folder, to be evaluated; a `ValueError` says why it cannot be.

    attention : the name that transformers has for the kernel; None for PyTorch's, or the model's own if it has no other
    dtype     : None for the one that it was saved in
    """
    from transformers import CONFIG_MAPPING

    require_regular_files(folder, "MODEL")
    if (folder / _ADAPTER).exists():
        raise ValueError(
            f"MODEL {folder} holds an adapter beside its weights ({_ADAPTER}), which would not be read. Merge it into "
            "the weights and save the model again."
        )
    values = _read_config(folder)
    files = _weight_files(folder)
    tensors = _map_tensors(files, folder)
    _require_counts(values, folder, len(tensors))
    size = sum(file.stat().st_size for file in files)
    with _quietly(), _transformers_errors(folder, "cannot be built as its config.json says"):
        config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
        with _bounded_building(folder, num_tensors=len(tensors), num_bytes=size):
            loaded: Any = _model_class(config).from_pretrained(
                None,
                config=_text_config(config),
                state_dict=tensors,
                attn_implementation=attention,
                dtype="auto" if dtype is None else dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
            )
    model, notes = loaded
    _require_all_loaded(model, notes, tensors, folder)
    unread = tuple(sorted(notes["unexpected_keys"]))
    _require_no_more_layers(model, unread, folder)
    with _quietly(), _transformers_errors(folder, "cannot be run"), torch.no_grad():
        model.eval()(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    return Pretrained(model, unread)


def says_gated(folder: Path) -> bool:
    """Tell whether a folder says that its model has gates: by its configuration, or by the name of its weights."""
    from tidegate.torch.retrofit.folder import weights_variant
    from tidegate.torch.retrofit.record import RECORD_NAME

    return weights_variant(folder) is not None or bool(_read_config(folder).get(RECORD_NAME))


def load_tokenizer(folder: Path) -> Callable[[str], list[int]]:
    """Return what makes tokens of a text by the tokenizer in a model's folder; a `ValueError` if it has none."""
    from transformers import AutoTokenizer

    reading = "has no tokenizer that can be read"
    with _quietly(), _transformers_errors(folder, reading):
        _require_own_files(folder)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    def tokenize(text: str) -> list[int]:
        with _quietly(), _transformers_errors(folder, reading):
            return tokenizer(text, add_special_tokens=False)["input_ids"]

    return tokenize


def _require_own_files(folder: Path) -> None:
    """Refuse lists of files, in what transformers itself reads of a folder, that name any outside of it."""
    for file, option in _FILE_LISTS:
        if not (folder / file).is_file():
            continue
        values = _read_json(folder / file)
        names = cast("dict[str, Any]", values).get(option) if isinstance(values, dict) else None
        if names and not (isinstance(names, list) and all(map(_is_plain_name, cast("list[Any]", names)))):
            raise _ConfigError(
                f"{folder / file} must have names of files beside it as its {option}; got {echo(names)}. Remove that "
                "option."
            )


def require_regular_files(folder: Path, what: str) -> None:
    """Refuse a folder with pipes, devices or sockets in it, which might be waited for, or read, without end.

    what : how the command line names the folder
    """
    for path in sorted(folder.iterdir()):
        try:
            kind = irregular_kind(path)
        except OSError as problem:
            raise ValueError(f"{what} {folder} holds {path.name}, which cannot be read: {problem.strerror}.") from None
        if kind not in ("", "a folder"):
            raise ValueError(f"{what} {folder} holds {path.name}, which is {kind} and no file. Remove it.")


def _read_config(folder: Path) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    values = _read_json(folder / _CONFIG)
    if not isinstance(values, dict) or not isinstance(cast("dict[str, Any]", values).get("model_type"), str):
        raise ValueError(f"{folder / _CONFIG} must be a JSON object that says its model_type.")
    if values["model_type"] not in CONFIG_MAPPING:
        raise ValueError(
            f"{folder / _CONFIG} says model_type {echo(values['model_type'])}, which transformers does not know."
        )
    return cast("dict[str, Any]", values)


def _read_json(path: Path) -> Any:
    try:
        return read_json(path.read_bytes())
    except ValueError as problem:
        raise ValueError(f"{path} is no JSON: {problem}. Fetch it again, or mend it.") from problem


def _weight_files(folder: Path) -> list[Path]:
    from tidegate.torch.retrofit.folder import weight_file_names, weights_variant

    weights, index_name = weight_file_names(weights_variant(folder))
    if (folder / weights).is_file():
        return [folder / weights]
    index = folder / index_name
    if not index.is_file():
        raise ValueError(
            f"MODEL {folder} has neither {weights} nor {index_name}. Weights are read from safetensors alone; "
            "save_pretrained of transformers writes them."
        )
    places: Any = _read_json(index)
    names = places.get("weight_map") if isinstance(places, dict) else None
    if not isinstance(names, dict) or not names or not all(map(_is_shard, cast("dict[str, Any]", names).values())):
        raise ValueError(f"{index} must have a weight_map from tensors to .safetensors files beside it.")
    files = [folder / name for name in sorted(set(cast("dict[str, str]", names).values()))]
    if absent := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"MODEL {folder} lacks {list_some(absent)}, which its {index_name} names. Fetch it again.")
    return files


def _is_shard(name: object) -> bool:
    return _is_plain_name(name) and str(name).endswith(".safetensors")


def _is_plain_name(name: object) -> bool:
    """Whether this is the name of a file, and no path to another folder."""
    return isinstance(name, str) and re.fullmatch(r"[^/\\\0]+", name) is not None


def _map_tensors(files: list[Path], folder: Path) -> dict[str, Tensor]:
    """Map the tensors of all files; nothing is read before it is needed."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is no dictionary
        except SafetensorError as problem:
            raise ValueError(f"MODEL {folder} has weights that cannot be read: {file.name}: {problem}.") from problem
    if not tensors:
        raise ValueError(f"MODEL {folder} has no tensors in {list_some([file.name for file in files])}.")
    return tensors


def _require_counts(values: dict[str, Any], folder: Path, num_tensors: int) -> None:
    """Refuse options that count more than the files can hold: a list of that length may be made of them."""
    most = max(_MOST_COUNTED, num_tensors)
    for name, number in _counts(values):
        if number > most:
            raise _ConfigError(
                f"{folder / _CONFIG} says {name}: {number}, and the weights beside it have {num_tensors} tensors. "
                "They do not belong together."
            )


def _counts(values: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Give the whole numbers of options that count, however deep they stand; those in a list have its name."""
    todo: list[tuple[str, Any]] = [("", values)]
    while todo:
        name, value = todo.pop()
        if isinstance(value, dict):
            todo += cast("dict[str, Any]", value).items()
        elif isinstance(value, list):
            todo += [(name, item) for item in cast("list[Any]", value)]
        elif isinstance(value, int) and _COUNTS.search(name):
            yield name, value


def _model_class(config: Any) -> Any:
    """Choose the class for language models of such a configuration, as transformers' own automatic class does."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise _ConfigError(f"transformers has no language model of the model_type {config.model_type!r}.")
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    classes = {each.__name__: each for each in found} if isinstance(found, tuple | list) else {"": found}
    named = [classes[name] for name in getattr(config, "architectures", None) or () if name in classes]
    return (named or list(classes.values()))[0]


def _text_config(config: Any) -> Any:
    """Return the part of a configuration that the class for language models takes."""
    part = config.sub_configs.get("text_config")
    return config.get_text_config() if part is not None and _model_class(config).config_class == part else config


def _require_all_loaded(model: nn.Module, notes: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    """Refuse a model with tensors that were not in its files, or of another shape or kind of number.

    Tied weights, and buffers that a model makes itself, are not among them.
    """
    if missing := sorted(notes["missing_keys"]):
        raise ValueError(
            f"MODEL {folder} lacks tensors that its {_CONFIG} asks for, and would have random numbers in their place: "
            f"{list_some(missing)}. Save it again as a whole."
        )
    others = [
        f"{name} is {tuple(given)} instead of {tuple(asked)}" for name, given, asked in sorted(notes["mismatched_keys"])
    ] + [
        f"{name} is {tensors[name].dtype} instead of {asked.dtype}"
        for name, asked in model.state_dict().items()
        if name in tensors and tensors[name].is_floating_point() != asked.is_floating_point()
    ]
    if others:
        raise ValueError(f"MODEL {folder} has weights that do not fit its {_CONFIG}: {list_some(others, most=3)}.")


def _require_no_more_layers(model: nn.Module, unread: tuple[str, ...], folder: Path) -> None:
    """Refuse a model that leaves out some of many tensors that differ by a number alone, such as those of a layer."""
    kinds = {_without_numbers(name) for name in model.state_dict()}
    if left_out := [name for name in unread if _without_numbers(name) in kinds]:
        raise ValueError(
            f"MODEL {folder} has weights of more layers than its {_CONFIG} asks for, and would run without them: "
            f"{list_some(left_out)}."
        )


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)


@contextmanager
def _bounded_building(folder: Path, *, num_tensors: int, num_bytes: int) -> Generator[None]:
    """Stop the building of modules that the files cannot fill; what is loaded into them does not count."""
    counted = {"modules and parameters": 0, "numbers": 0, "bytes of buffers": 0}
    most = {
        "modules and parameters": _MOST_PER_TENSOR_OR_BYTE * num_tensors + _EXTRA_MODULES,
        "numbers": _MOST_PER_TENSOR_OR_BYTE * num_bytes + _EXTRA_NUMBERS,
        "bytes of buffers": num_bytes + _EXTRA_BUFFER_BYTES,
    }

    def count(what: str, number: int) -> None:
        counted[what] += number
        if counted[what] > most[what]:
            raise _ConfigError(
                f"{folder / _CONFIG} asks for more than {most[what]:,} {what}, and the weights beside it have "
                f"{num_tensors} tensors in {num_bytes:,} bytes. They do not belong together."
            )

    def count_module(_module: nn.Module, _name: str, _child: nn.Module | None) -> None:
        count("modules and parameters", 1)

    def count_parameter(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.is_meta:
            count("modules and parameters", 1)
            count("numbers", parameter.numel())

    def count_buffer(_module: nn.Module, _name: str, buffer: Tensor | None) -> None:
        if buffer is not None and buffer.is_meta:
            count("bytes of buffers", buffer.nbytes)

    hooks = (
        register_module_module_registration_hook(count_module),
        register_module_parameter_registration_hook(count_parameter),
        register_module_buffer_registration_hook(count_buffer),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _transformers_errors(folder: Path, complaint: str) -> Generator[None]:
    """Turn whatever transformers raises into a `ValueError`."""
    try:
        yield
    except _ConfigError:
        raise
    # It checks little of what it is given: a wrong value raises errors of a dozen unrelated classes.
    except Exception as problem:
        reason = shorten(" ".join(str(problem).split()).rstrip("."))
        raise ValueError(f"MODEL {folder} {complaint} ({type(problem).__name__}: {reason}).") from problem


@contextmanager
def _quietly() -> Generator[None]:
    """Silence transformers, which logs names of tensors and shows bars, and keep the hub's client off the network."""
    from huggingface_hub import constants
    from transformers.utils import logging as bars

    logger, shown, offline = logging.getLogger("transformers"), bars.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    bars.disable_progress_bar()
    constants.HF_HUB_OFFLINE = True
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logger.setLevel(level)
        if shown:
            bars.enable_progress_bar()
