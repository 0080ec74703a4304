"""Load language models from disk: the module, its blocks, and its tokenizer.

Our models are files of `tidegate.torch.save_model`, folders with one such file, or folders of our class for
transformers. A Hugging Face model is a folder with a `config.json`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from inspect import signature
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tidegate._files import nonregular_file_type
from tidegate._validation import InputError
from tidegate.lab.models.hugging_face import declares_gates, load_from_folder, load_tokenizer, require_regular_files
from tidegate.lab.tasks.documents import character_start, read_json
from tidegate.lab.tasks.shards import open_whole_shards, read_index, require_whole_shards, tokenizer_text
from tidegate.lab.tasks.source import read_corpus, read_tokens, resolve_source, source_kind
from tidegate.lab.tasks.streams import TokenStream
from tidegate.lab.tasks.tokenizer import byte_tokenizer, portable_tokenizer, read_tokenizer, slices
from tidegate.torch import TransformerLM, load_model

Encode: TypeAlias = Callable[[bytes], list[int]]
Decode: TypeAlias = Callable[[list[int]], bytes]

_ENCODED_BYTES = 1 << 20
"""Number of bytes of text encoded at once: the tokenizers library allocates many times as much."""
_BYTES_PER_TOKEN = 8
"""More than the average token of most texts."""
_LONG_TEXT = 64 * _BYTES_PER_TOKEN
"""A text with more bytes than this per requested token is not encoded as a whole."""
_CUT_TOKENS = 16
"""Number of tokens to drop at both ends of a piece of text: those in between are the same as in the whole text."""
_ATTENTION = ("attention", "self_attn", "attn", "self_attention")
"""Names of the attention in a block."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
    """A decoder, ready to be evaluated."""

    name: str
    module: nn.Module
    run: Callable[[Tensor], object]
    """Runs the model on tokens (B, T); the result is not used."""
    blocks: tuple[nn.Module, ...]
    encode: Encode
    """Converts text to tokens."""
    vocab_size: int
    max_length: int | None
    """Number of positions; None has no limit."""
    trained_length: int | None = None
    """Length in tokens of the training sequences; None if unknown."""
    decode: Decode | None = None
    """Converts tokens to text; None if unknown."""
    token_bytes: NDArray[np.int64] | None = None
    """(vocabulary,): length of each token in bytes; None if unknown."""
    tokenizer: str | None = None
    """The byte-pair tokenizer as JSON, empty if tokens are bytes; None for other tokenizers."""
    unread: tuple[str, ...] = ()
    """Names of tensors in the model's files that its class does not use."""
    place: str = ""
    """The path that it was loaded from, or empty."""

    def attentions(self) -> tuple[nn.Module, ...]:
        """Return the attention of each block; raise InputError if a block has none by a known name."""
        found: list[nn.Module] = []
        for number, block in enumerate(self.blocks):
            children = dict(block.named_children())
            name = next((name for name in _ATTENTION if name in children), None)
            if name is None:
                expected = f"a model whose blocks have an attention named {', '.join(_ATTENTION)}"
                hint = f"Block {number} has {', '.join(children)}. Measure whole blocks with part='block'."
                raise InputError("model", expected=expected, got=self.name, hint=hint)
            found.append(children[name])
        return tuple(found)


def load_language_model(
    path: str | Path, *, derivatives: bool = True, gates: str | Path | None = None
) -> LanguageModel:
    """Load one of our models or a Hugging Face folder.

    Gates in a folder written by the retrofit's `save_pretrained` are loaded too. A folder that declares gates but does
    not contain them is an error: without gates the model is another.

    Args:
        path: The file or folder.
        derivatives: Whether derivatives will be computed: in float64 and without fused kernels, which have no forward
            mode. Otherwise the model keeps its dtype and kernels.
        gates: A folder of `save_gates`, for a Hugging Face model; None uses the gates in the model's folder.

    Raises:
        InputError: The model does not exist or cannot be loaded.
    """
    place = Path(path)
    if not place.exists():
        expected = "an existing file or folder"
        raise InputError("model", expected=expected, got=place, hint="Pass a file of save_model, or a model's folder.")
    if place.is_dir() and (place / "config.json").is_file():
        return replace(_from_hugging_face(place, derivatives, gates), place=str(place))
    if gates is not None:
        hint = f"{place} is not a Hugging Face folder: omit gates, or pass another model."
        raise InputError("gates", expected="None for one of our models", got=gates, hint=hint)
    if place.is_dir():
        require_regular_files("model", place)
    elif kind := nonregular_file_type(place):
        raise InputError("model", expected="a file of save_model", got=place, hint=f"It is {kind}.")
    # Hidden files, such as `._model.safetensors` of macOS, are not models.
    files = sorted(place.glob("[!.]*.safetensors")) if place.is_dir() else [place]
    if len(files) != 1:
        expected = "a folder with a config.json (Hugging Face) or one .safetensors file of save_model"
        raise InputError("model", expected=expected, got=place, hint=f"It has {len(files)} .safetensors files.")
    model = load_model(files[0])
    if not isinstance(model, TransformerLM):
        raise InputError("model", expected="a language model", got=f"{type(model).__name__} in {files[0]}")
    name = files[0].parent.name if files[0].name == "model.safetensors" else files[0].stem
    tokenizer = tokenizer_beside(files[0], model)
    loaded = make_language_model(model, name=name, derivatives=derivatives, tokenizer=tokenizer)
    return replace(loaded, place=str(place))


def make_language_model(
    model: TransformerLM, *, name: str, derivatives: bool = True, tokenizer: str = ""
) -> LanguageModel:
    """Wrap a copy of one of our models; the model itself does not change.

    With `derivatives` the copy is in float64. `tokenizer` is its byte-pair tokenizer as JSON; empty if tokens are
    bytes, or unknown.
    """
    copied = copy.deepcopy(model).eval()
    if derivatives:
        copied.double()
    config, vocab_size = copied.config, copied.config.vocab_size
    known = bool(tokenizer) or vocab_size == 256
    reader = read_tokenizer(tokenizer, vocab_size) if tokenizer else byte_tokenizer()
    pairs = reader.merges

    def encode(text: bytes) -> list[int]:
        if pairs is not None:
            return pairs.encode(text.decode("utf-8", errors="replace")).ids
        if vocab_size != 256:
            expected = f"a .npy file of tokens for {name}, whose {vocab_size:,} tokens are not bytes"
            raise InputError("data", expected=expected)
        return list(text)

    def decode(tokens: list[int]) -> bytes:
        return bytes(tokens) if pairs is None else pairs.decode(tokens).encode()

    return LanguageModel(
        name=name,
        module=copied,
        run=copied,
        blocks=tuple(copied.stack.blocks),
        encode=encode,
        vocab_size=vocab_size,
        max_length=config.max_length if config.positions == "learned" else None,
        trained_length=config.max_length,
        decode=decode if known else None,
        token_bytes=reader.token_bytes if known else None,
        tokenizer=tokenizer if known else None,
    )


def token_windows(
    model: LanguageModel, data: str | None, *, length: int, count: int, field: str | None = None
) -> Tensor:
    """Return windows (count, length) of tokens, evenly spread over a text; fewer if they would overlap.

    If the text is long, only the windows and their surroundings are encoded. `data` and `field` are those of
    `text_tokens`.
    """
    require_known_length(model, length)
    source = resolve_source("stdlib" if data is None else data)
    if source_kind(source) in ("tokens", "shards"):
        return spread_windows(text_tokens(model, data, field=field), length=length, count=count)
    text = _read_text(source, field)
    if len(text) > _LONG_TEXT * length * count:
        # One window at the start of each of `count` equal parts; none if a part has too few tokens.
        bounds = [character_start(text, row * len(text) // count) for row in range(count + 1)]
        found = [_first_tokens(model, text, start, stop, length) for start, stop in pairwise(bounds)]
        if windows := [tokens for tokens in found if len(tokens) == length]:
            tokens = np.array(windows, dtype=np.int64)
            _require_known_tokens(tokens, model)
            return torch.from_numpy(tokens)
    return spread_windows(_encode_text(model, text), length=length, count=count)


def spread_windows(tokens: TokenStream, *, length: int, count: int) -> Tensor:
    """Return windows (count, length) of tokens (n,), evenly spread; fewer if they would overlap."""
    if len(tokens) < length:
        raise InputError("data", expected=f"at least {length} tokens", got=len(tokens), hint="Give more text.")
    available = len(tokens) // length
    rows = np.arange(min(count, available)) * available // min(count, available)
    return torch.from_numpy(tokens[rows[:, None] * length + np.arange(length)].astype(np.int64))


def _first_tokens(model: LanguageModel, text: bytes, start: int, stop: int, length: int) -> list[int]:
    """Return the first `length` tokens of a part of a text; fewer if the part has fewer."""
    num_bytes = _BYTES_PER_TOKEN * (length + 2 * _CUT_TOKENS)
    while True:
        tokens = model.encode(text[start : min(start + num_bytes, stop)])[_CUT_TOKENS:-_CUT_TOKENS]
        if len(tokens) >= length or start + num_bytes >= stop:
            return tokens[:length]
        num_bytes *= 2


def text_tokens(model: LanguageModel, data: str | None, *, field: str | None = None) -> TokenStream:
    """Return the tokens (count,) of a text in the smallest dtype for the vocabulary.

    `data` is a source of text or tokens, as for a comparison; None reads Python's own sources. `field` has the text in
    lines of a .jsonl file. Files of tokens and shards are memory-mapped. Shards must be made with the model's
    tokenizer; all of their tokens are returned, including those held out in training.
    """
    source = resolve_source("stdlib" if data is None else data)
    kind = source_kind(source)
    if kind not in ("tokens", "shards"):
        return _encode_text(model, _read_text(source, field))
    if field is not None:
        raise InputError("field", expected="None for data of tokens", got=field, hint="It applies to text; omit it.")
    if kind == "shards":
        folder = Path(source)
        index = read_index(folder)
        _require_own_tokenizer(model, tokenizer_text(folder, index))
        require_whole_shards(folder, index)
        return open_whole_shards(folder, index)
    tokens = read_tokens(source).tokens
    _require_known_tokens(tokens, model)
    return tokens


def _require_own_tokenizer(model: LanguageModel, tokenizer: str) -> None:
    """Raise InputError unless the model has this tokenizer: byte pairs as JSON, or empty for bytes."""
    own, place, hint = model.tokenizer, Path(model.place), "Pass the text itself"
    if own is not None:
        if own == tokenizer or (own and tokenizer and portable_tokenizer(own) == portable_tokenizer(tokenizer)):
            return
        file = (place if place.is_dir() else place.parent) / "tokenizer.json"
        hint += f", or tokenize it with the tokenizer {file if own else 'bytes'}"
    raise InputError("data", expected=f"shards made with the tokenizer of {model.name}", hint=f"{hint}.")


def _read_text(source: str, field: str | None) -> bytes:
    return b"\n".join(document.content for document in read_corpus(source, field).documents)


def _encode_text(model: LanguageModel, text: bytes) -> NDArray[np.integer[Any]]:
    parts: list[NDArray[np.integer[Any]]] = []
    for piece in slices(text, _ENCODED_BYTES):
        tokens = np.asarray(model.encode(text[piece]), dtype=np.int64)
        _require_known_tokens(tokens, model)
        parts.append(tokens.astype(np.min_scalar_type(model.vocab_size - 1)))
    return np.concatenate(parts)


def require_known_length(model: LanguageModel, length: int) -> None:
    """Raise InputError if the model has fewer than `length` positions."""
    if model.max_length is not None and length > model.max_length:
        raise InputError("length", expected=f"at most {model.max_length}, the positions of {model.name}", got=length)


def _require_known_tokens(tokens: NDArray[np.integer[Any]], model: LanguageModel) -> None:
    largest = int(tokens.max(initial=0))
    if largest >= model.vocab_size:
        expected = f"of tokens below {model.vocab_size}, the vocabulary of {model.name}"
        raise InputError("data", expected=expected, got=largest)


def tokenizer_beside(path: Path, model: TransformerLM) -> str:
    """Return the tokenizer beside a model file of `tidegate train`; empty if there is none."""
    file = path.parent / "tokenizer.json"
    if path.name != "model.safetensors" or not file.exists():
        return ""
    if kind := nonregular_file_type(file):
        raise InputError("tokenizer", expected="a file", got=file, hint=f"It is {kind}. Remove it.")
    text, vocab_size = file.read_text(encoding="utf-8", errors="replace"), model.config.vocab_size
    hint = "Restore the tokenizer of the training."
    try:
        num_tokens = len(read_tokenizer(text, vocab_size).token_bytes)
    # The library has no exception class for invalid files.
    except Exception as problem:
        hint = f"The problem: {problem}. {hint}"
        raise InputError("tokenizer", expected="a byte-pair tokenizer", got=file, hint=hint) from None
    if num_tokens > vocab_size:
        expected = f"one of at most {vocab_size} tokens, like the model beside it"
        raise InputError("tokenizer", expected=expected, got=num_tokens, hint=f"{file} is for another model. {hint}")
    return text


def _from_hugging_face(folder: Path, derivatives: bool, gates: str | Path | None) -> LanguageModel:
    # Importing it registers our class with transformers.
    hf: Any = import_module("tidegate.torch.hf")
    if gates is None and import_module("tidegate.torch.retrofit.folder").has_gates(folder):
        gates = folder
    exact = derivatives and gates is None
    attention = "eager" if derivatives else None
    model, unread = load_from_folder(folder, attention=attention, dtype=torch.float64 if exact else None)
    if gates is None:
        _require_no_gates(folder, unread)
    else:
        if not Path(gates).is_dir():
            raise InputError("gates", expected="a folder of save_gates", got=gates)
        require_regular_files("gates", Path(gates))
        # Gates are loaded in the model's dtype.
        import_module("tidegate.torch.retrofit").load_gates(model, gates)
        model = model.double() if derivatives else model
    config: Any = model.config.get_text_config()
    for name in ("vocab_size", "num_hidden_layers"):
        if not hasattr(config, name):
            raise InputError("model", expected=f"a folder whose config.json has {name}", got=folder)
    # The logits are not needed, and may take more memory than everything else.
    fewer = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
    # The tokenizer is loaded once, for the first text.
    tokenizer = cache(partial(load_tokenizer, folder))

    def encode(text: bytes) -> list[int]:
        # Without a tokenizer, a vocabulary of 256 consists of bytes, as in our models.
        if config.vocab_size == 256 and not any(folder.glob("tokenizer*")):
            return list(text)
        return tokenizer()(text.decode("utf-8", errors="replace"))

    if gates is None and isinstance(model, hf.TidegateForCausalLM):
        return _from_our_class(hf.to_transformer_lm(model), folder, encode, derivatives, unread)
    return LanguageModel(
        name=folder.resolve().name,
        module=model,
        run=lambda tokens: model(input_ids=tokens, use_cache=False, **fewer),
        blocks=_blocks(model, config.num_hidden_layers, folder),
        encode=encode,
        vocab_size=config.vocab_size,
        max_length=getattr(config, "max_position_embeddings", None),
        unread=unread,
    )


def _from_our_class(
    model: TransformerLM, folder: Path, encode: Encode, derivatives: bool, unread: tuple[str, ...]
) -> LanguageModel:
    """Wrap one of our models that was saved for transformers; with a foreign tokenizer, it cannot decode tokens."""
    pairs = tokenizer_beside(folder / "model.safetensors", model) if _has_byte_pairs(folder) else ""
    own = make_language_model(model, name=folder.resolve().name, derivatives=derivatives, tokenizer=pairs)
    if not pairs:
        own = replace(own, encode=encode)
        if any(folder.glob("tokenizer*")):
            own = replace(own, decode=None, token_bytes=None, tokenizer=None)
    return replace(own, unread=unread)


def _has_byte_pairs(folder: Path) -> bool:
    """Return whether a folder has a tokenizer as written by `tidegate export`: byte pairs without added tokens."""
    try:
        found: Any = read_json((folder / "tokenizer.json").read_bytes())
        kinds = found["model"]["type"], found["pre_tokenizer"]["type"], found["decoder"]["type"]
        return kinds == ("BPE", "ByteLevel", "ByteLevel") and not found["added_tokens"] and not found["normalizer"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _require_no_gates(folder: Path, unread: tuple[str, ...]) -> None:
    """Raise InputError if a model was loaded without gates although its folder declares or contains some."""
    if any("attn_gate" in name.split(".") for name in unread) or declares_gates(folder):
        expected = "a folder with gates.json, since its model was saved with gates"
        hint = (
            "Save it again with save_pretrained of tidegate.torch.retrofit, or pass a folder of save_gates as gates. "
            "To measure the model without gates, load it with from_pretrained of transformers, with "
            "variant='without_gates' if its weights have that name, delete model.config.tidegate_gates and save it to "
            "another folder."
        )
        raise InputError("model", expected=expected, got=folder, hint=hint)


def _blocks(model: nn.Module, count: int, folder: Path) -> tuple[nn.Module, ...]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count > 0:
            return tuple(module)
    raise InputError("model", expected=f"one with a list of {count} blocks, as in its config.json", got=folder)
