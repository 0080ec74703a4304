"""Load Hugging Face models from an untrusted folder: nothing is unpickled, executed or downloaded.

Configuration and tensors are read here and passed to transformers in place of the folder, so that nothing in it can
direct transformers to adapters, code, pickles or files outside. The tokenizer is read by transformers from the folder,
after file names in its configuration that lead elsewhere are rejected. Time and memory are bounded by the size of the
files:

- An option that counts layers or labels may be at most 4,096 or the number of tensors in the files, since configuration
  classes build lists of that length.
- The model is built on the meta device. Building stops at more than 16 modules and parameters per tensor, 16 numbers
  per byte of the files, or more bytes of buffers than the files have; small models get a fixed allowance.

Then all tensors are compared with the files. Missing tensors and wrong shapes are errors: transformers would initialize
them randomly.
"""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from tidegate._files import nonregular_file_type
from tidegate._text import list_some, short_repr, shorten
from tidegate._validation import InputError
from tidegate.lab.tasks.documents import read_json
from tidegate.lab.tasks.source import log_level

_CONFIG = "config.json"
_ADAPTER = "adapter_config.json"
_TOKENIZER_CONFIG = "tokenizer_config.json"
_FILE_LISTS = (
    (_CONFIG, "configuration_files"),
    (_TOKENIZER_CONFIG, "fast_tokenizer_files"),
    (_TOKENIZER_CONFIG, "init_inputs"),
)
"""Options that list further files, which transformers opens when it loads a tokenizer."""

_COUNTS = re.compile(r"(?:^|_)(?:layers|labels|n_layer|num_layer)$|^attention_types$")
"""Names of options from which configuration classes build lists, such as `num_hidden_layers` and `num_labels`.

`attention_types` of GPT-Neo lists names and how often to repeat them.
"""
_MOST_COUNTED = 4096
_MOST_PER_TENSOR_OR_BYTE = 16
_EXTRA_MODULES = 2_000
_EXTRA_NUMBERS = 1 << 22
_EXTRA_BUFFER_BYTES = 1 << 26


def load_from_folder(folder: Path, *, attention: str | None, dtype: torch.dtype | None) -> tuple[Any, tuple[str, ...]]:
    """Load the language model in a folder, for evaluation, and list the tensors that its class does not use.

    `attention` is the attention implementation of transformers; None takes its default. A `dtype` of None keeps the
    saved one.

    Raises:
        InputError: The folder has no model that can be loaded.
    """
    from transformers import CONFIG_MAPPING

    require_regular_files("model", folder)
    if (folder / _ADAPTER).exists():
        hint = "Merge the adapter into the weights and save the model again."
        raise InputError("model", expected="a folder without an adapter", got=folder / _ADAPTER, hint=hint)
    values = _read_config(folder)
    files = _weight_files(folder)
    tensors = _map_tensors(files, folder)
    most = max(_MOST_COUNTED, len(tensors))
    for name, number in _counts(values):
        if number > most:
            expected = f"at most {most}, as the weights have {len(tensors)} tensors"
            raise InputError(name, expected=expected, got=number, hint=f"It is in {folder / _CONFIG}.")
    size = sum(file.stat().st_size for file in files)
    with silent_transformers(), _transformers_errors(folder, "a folder whose config.json describes a model"):
        config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
        with _bounded_building(folder, num_tensors=len(tensors), num_bytes=size):
            model_class = _model_class(config)
            part = config.sub_configs.get("text_config")
            # A class for text only takes the text part of a configuration of several parts.
            fits_whole = part is None or model_class.config_class != part
            loaded: Any = model_class.from_pretrained(
                None,
                config=config if fits_whole else config.get_text_config(),
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
    with silent_transformers(), _transformers_errors(folder, "a folder with a model that runs"), torch.no_grad():
        model.eval()(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    return model, unread


def declares_gates(folder: Path) -> bool:
    """Return whether the configuration in a folder, or the name of its weights, declares gates."""
    from tidegate.torch.retrofit.folder import weights_variant
    from tidegate.torch.retrofit.install import RECORD_NAME

    return weights_variant(folder) is not None or bool(_read_config(folder).get(RECORD_NAME))


def load_tokenizer(folder: Path) -> Callable[[str], list[int]]:
    """Return a function that tokenizes text with the tokenizer in a model's folder; raise InputError if it has none."""
    from transformers import AutoTokenizer

    expected = "a folder with a tokenizer that transformers can load"
    remedy = "Put the tokenizer's files there, or pass data as a .npy file of tokens."
    with silent_transformers(), _transformers_errors(folder, expected, remedy):
        for file, option in _FILE_LISTS:
            values: Any = _read_json(folder / file) if (folder / file).is_file() else None
            names = values.get(option) if isinstance(values, dict) else None
            if names and not (isinstance(names, list) and all(map(_is_plain_name, names))):
                hint = f"Remove that option from {folder / file}."
                raise InputError(option, expected="a list of names of files in the same folder", got=names, hint=hint)
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)

    def tokenize(text: str) -> list[int]:
        with silent_transformers(), _transformers_errors(folder, expected, remedy):
            return tokenizer(text, add_special_tokens=False)["input_ids"]

    return tokenize


def require_regular_files(field: str, folder: Path) -> None:
    """Raise InputError if a folder contains pipes, devices or sockets, which could block reading forever."""
    for path in sorted(folder.iterdir()):
        try:
            kind = nonregular_file_type(path)
        except OSError as problem:
            raise InputError(field, expected="a readable folder", got=path, hint=f"{problem.strerror}.") from None
        if kind not in ("", "a directory"):
            raise InputError(field, expected="a folder of files", got=path, hint=f"It is {kind}. Remove it.")


def _read_config(folder: Path) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    values: Any = _read_json(folder / _CONFIG)
    kind = values.get("model_type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        expected = f"a folder whose {_CONFIG} has a model_type that transformers knows"
        hint = f"Its model_type is {short_repr(kind)}; the file must be a JSON object."
        raise InputError("model", expected=expected, got=folder, hint=hint)
    return values


def _read_json(path: Path) -> Any:
    try:
        return read_json(path.read_bytes())
    except ValueError as problem:
        hint = f"The problem: {problem}. Download it again, or repair it."
        raise InputError(path.name, expected="valid JSON", got=path, hint=hint) from problem


def _weight_files(folder: Path) -> list[Path]:
    from tidegate.torch.retrofit.folder import weight_file_names, weights_variant

    weights, index_name = weight_file_names(weights_variant(folder))
    if (folder / weights).is_file():
        return [folder / weights]
    index = folder / index_name
    if not index.is_file():
        hint = "Only safetensors weights are loaded; save_pretrained of transformers writes them."
        raise InputError("model", expected=f"a folder with {weights} or {index_name}", got=folder, hint=hint)
    places: Any = _read_json(index)
    weight_map = places.get("weight_map") if isinstance(places, dict) else None
    names: list[Any] = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not names or not all(_is_plain_name(name) and name.endswith(".safetensors") for name in names):
        expected = "a map from tensors to names of .safetensors files in the same folder"
        raise InputError("weight_map", expected=expected, got=weight_map, hint=f"It is in {index}.")
    files = [folder / name for name in sorted(set(names))]
    if absent := [file.name for file in files if not file.is_file()]:
        hint = f"Download {list_some(absent)} again."
        raise InputError("model", expected=f"a folder with all files of its {index_name}", got=folder, hint=hint)
    return files


def _is_plain_name(name: object) -> TypeGuard[str]:
    """Return whether this is a file name, not a path to another folder."""
    return isinstance(name, str) and re.fullmatch(r"[^/\\\0]+", name) is not None


def _map_tensors(files: list[Path], folder: Path) -> dict[str, Tensor]:
    """Memory-map the tensors of all files."""
    from safetensors import SafetensorError, safe_open

    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, it is not a dictionary
        except SafetensorError as problem:
            hint = f"The problem: {problem}."
            raise InputError("model", expected="readable weights", got=file, hint=hint) from problem
    if not tensors:
        raise InputError("model", expected="a folder with tensors in its weights", got=folder)
    return tensors


def _counts(values: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield names and values of the options that count something, at any depth; numbers in a list have its name."""
    waiting: list[tuple[str, Any]] = [("", values)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += cast("dict[str, Any]", value).items()
        elif isinstance(value, list):
            waiting += [(name, item) for item in cast("list[Any]", value)]
        elif isinstance(value, int) and _COUNTS.search(name):
            yield name, value


def _model_class(config: Any) -> Any:
    """Return the language-model class for a configuration, as `AutoModelForCausalLM` does."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        expected = "of a model_type with a language-model class in transformers"
        raise InputError("model", expected=expected, got=config.model_type)
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    classes = {each.__name__: each for each in found} if isinstance(found, tuple | list) else {"": found}
    named = [classes[name] for name in getattr(config, "architectures", None) or () if name in classes]
    return (named or list(classes.values()))[0]


def _require_all_loaded(model: nn.Module, notes: dict[str, Any], tensors: dict[str, Tensor], folder: Path) -> None:
    """Raise InputError about tensors that are missing in the files, or have the wrong shape or kind of dtype.

    Tied weights and buffers that a model creates itself may be missing.
    """
    expected = f"a folder with the tensors of its {_CONFIG}"
    if missing := sorted(notes["missing_keys"]):
        hint = f"Missing, so that they would be random: {list_some(missing)}. Save the whole model again."
        raise InputError("model", expected=expected, got=folder, hint=hint)
    others = [
        f"{name} is {tuple(given)}, not {tuple(asked)}" for name, given, asked in sorted(notes["mismatched_keys"])
    ]
    others += [
        f"{name} is {tensors[name].dtype}, not {asked.dtype}"
        for name, asked in model.state_dict().items()
        if name in tensors and tensors[name].is_floating_point() != asked.is_floating_point()
    ]
    if others:
        raise InputError("model", expected=expected, got=folder, hint=f"{list_some(others, most=3)}.")


def _require_no_more_layers(model: nn.Module, unread: tuple[str, ...], folder: Path) -> None:
    """Raise InputError if unused tensors differ from used ones only by a number, like those of a further layer."""
    kinds = {re.sub(r"\d+", "#", name) for name in model.state_dict()}
    if left_out := [name for name in unread if re.sub(r"\d+", "#", name) in kinds]:
        hint = f"They would be ignored: {list_some(left_out)}."
        expected = f"a folder without weights of more layers than in its {_CONFIG}"
        raise InputError("model", expected=expected, got=folder, hint=hint)


@contextmanager
def _bounded_building(folder: Path, *, num_tensors: int, num_bytes: int) -> Generator[None]:
    """Limit the construction of modules to what the files can fill; loaded tensors do not count."""
    counted = {"modules and parameters": 0, "numbers": 0, "bytes of buffers": 0}
    most = {
        "modules and parameters": _MOST_PER_TENSOR_OR_BYTE * num_tensors + _EXTRA_MODULES,
        "numbers": _MOST_PER_TENSOR_OR_BYTE * num_bytes + _EXTRA_NUMBERS,
        "bytes of buffers": num_bytes + _EXTRA_BUFFER_BYTES,
    }

    def count(what: str, number: int) -> None:
        counted[what] += number
        if counted[what] > most[what]:
            expected = f"a folder whose {_CONFIG} fits its weights of {num_tensors} tensors in {num_bytes:,} bytes"
            hint = f"The configuration has more than {most[what]:,} {what}."
            raise InputError("model", expected=expected, got=folder, hint=hint)

    def count_parameter(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.is_meta:
            count("modules and parameters", 1)
            count("numbers", parameter.numel())

    def count_buffer(_module: nn.Module, _name: str, buffer: Tensor | None) -> None:
        if buffer is not None and buffer.is_meta:
            count("bytes of buffers", buffer.nbytes)

    with ExitStack() as hooks:
        hooks.callback(register_module_module_registration_hook(lambda *_: count("modules and parameters", 1)).remove)
        hooks.callback(register_module_parameter_registration_hook(count_parameter).remove)
        hooks.callback(register_module_buffer_registration_hook(count_buffer).remove)
        yield


@contextmanager
def _transformers_errors(folder: Path, expected: str, remedy: str = "") -> Generator[None]:
    """Turn any error of transformers into an InputError about the model."""
    try:
        yield
    except InputError:
        raise
    # transformers checks few of its inputs: wrong values raise errors of many unrelated classes.
    except Exception as problem:
        reason = shorten(" ".join(str(problem).split()).rstrip("."))
        hint = f"{type(problem).__name__}: {reason}. {remedy}".rstrip()
        raise InputError("model", expected=expected, got=folder, hint=hint) from problem


@contextmanager
def silent_transformers() -> Generator[None]:
    """Silence the logs and progress bars of transformers, and keep the hub's client offline."""
    from huggingface_hub import constants
    from transformers.utils import logging as bars

    shown, offline = bars.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE
    bars.disable_progress_bar()
    constants.HF_HUB_OFFLINE = True
    try:
        with log_level("transformers", logging.CRITICAL), warnings.catch_warnings(action="ignore"):
            yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        if shown:
            bars.enable_progress_bar()
