"""Language models from disk, as measurements take them: a module, its blocks, and tokens of a text.

One of ours is a file that `tidegate.torch.save_model` wrote, a folder with one such file, or a folder of our own class
for transformers. A Hugging Face model is a folder with a `config.json`.
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

from tidegate._files import irregular_kind
from tidegate.lab.models.hugging_face import load_from_folder, load_tokenizer, require_regular_files, says_gated
from tidegate.lab.tasks.documents import character_start, read_json
from tidegate.lab.tasks.shards import open_whole_shards, read_index, require_whole_shards, tokenizer_text
from tidegate.lab.tasks.source import read_corpus, read_tokens, resolve_source, source_kind
from tidegate.lab.tasks.streams import TokenStream
from tidegate.lab.tasks.task import DataError
from tidegate.lab.tasks.tokenizer import byte_tokenizer, portable_tokenizer, read_tokenizer, slices
from tidegate.torch import TransformerLM, load_model

Encode: TypeAlias = Callable[[bytes], list[int]]
Decode: TypeAlias = Callable[[list[int]], bytes]

_ENCODED_BYTES = 1 << 20
"""Of a text at once, about: the library keeps many bytes for each one that it encodes."""
_BYTES_PER_TOKEN = 8
"""More than tokens of most texts stand for, on average."""
_LONG_TEXT = 64 * _BYTES_PER_TOKEN
"""Bytes of a text, for each token that is wanted of it, from which on it is not encoded as a whole."""
_CUT_TOKENS = 16
"""At both ends of a piece of a text: between them its tokens are those of the whole text, wherever it was cut."""
_ATTENTION = ("attention", "self_attn", "attn", "self_attention")
"""What blocks call their attention."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LanguageModel:
    """A decoder, ready to be evaluated."""

    name: str
    module: nn.Module
    run: Callable[[Tensor], object]
    """Takes tokens (B, T); what it returns does not matter."""
    blocks: tuple[nn.Module, ...]
    encode: Encode
    """The tokens of a text."""
    vocab_size: int
    max_length: int | None
    """Positions that it knows; None has no limit."""
    trained_length: int | None = None
    """Tokens of the sequences that it was trained on; None if it does not say."""
    decode: Decode | None = None
    """The text of tokens; None if that is not known."""
    token_bytes: NDArray[np.int64] | None = None
    """(vocabulary,): bytes of text that a token stands for; None if that is not known."""
    tokenizer: str | None = None
    """The byte pairs of its tokens as JSON, empty where a token is a byte; None if its tokens are others."""
    unread: tuple[str, ...] = ()
    """Tensors of its files that its class does not know, and that are no part of it."""
    place: str = ""
    """The path that it was loaded from; empty if it was not."""

    def attentions(self) -> tuple[nn.Module, ...]:
        """The attention of each block; a `ValueError` if a block has none by a known name."""
        found: list[nn.Module] = []
        for number, block in enumerate(self.blocks):
            children = dict(block.named_children())
            name = next((name for name in _ATTENTION if name in children), None)
            if name is None:
                raise ValueError(
                    f"block {number} of {self.name} has no attention by the name of {', '.join(_ATTENTION)}; it has "
                    f"{', '.join(children)}. Measure whole blocks with --part block."
                )
            found.append(children[name])
        return tuple(found)


def load_language_model(
    path: str | Path, *, derivatives: bool = True, gates: str | Path | None = None
) -> LanguageModel:
    """Load one of our checkpoints or a Hugging Face folder; if it is neither, a `ValueError` says what is there.

    A folder of the retrofit's `save_pretrained` has its gates in it. One that says that its model has gates, and from
    which none are read, is refused: without them it is another model.

    derivatives : whether they will be taken: in float64 and without fused kernels, which have no forward mode. If
                  not, the model keeps its own dtype and runs as it does elsewhere
    gates       : a folder of `save_gates`, for a Hugging Face model; None takes those that lie in its own folder
    """
    place = Path(path)
    if not place.exists():
        raise ValueError(f"MODEL {place} is not there. Name a file of save_model, or a folder with a model in it.")
    if place.is_dir() and (place / "config.json").is_file():
        return replace(_from_hugging_face(place, derivatives, gates), place=str(place))
    if gates is not None:
        raise ValueError(f"--gates {gates} is for a Hugging Face model; MODEL {place} has its own. Leave it out.")
    if place.is_dir():
        require_regular_files(place, "MODEL")
    elif kind := irregular_kind(place):
        raise ValueError(f"MODEL {place} is {kind} and no file. Name a file of save_model.")
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if len(files) != 1:
        raise ValueError(
            f"MODEL {place} must hold a config.json (Hugging Face) or one .safetensors file of save_model; it holds "
            f"{len(files)} such files."
        )
    return replace(_ours(files[0], derivatives), place=str(place))


def language_model_of(
    model: TransformerLM, *, name: str, derivatives: bool = True, tokenizer: str = ""
) -> LanguageModel:
    """Wrap a copy of one of our models, in float64 for `derivatives`; the model itself stays as it is.

    tokenizer : the byte pairs of its tokens, as JSON; empty where a token is a byte, or not known
    """
    copied = copy.deepcopy(model).eval()
    if derivatives:
        copied.double()
    known = bool(tokenizer) or copied.config.vocab_size == 256
    reader = read_tokenizer(tokenizer, copied.config.vocab_size) if tokenizer else byte_tokenizer()
    pairs = reader.merges

    def encode(text: bytes) -> list[int]:
        if pairs is not None:
            return pairs.encode(text.decode("utf-8", errors="replace")).ids
        if copied.config.vocab_size != 256:
            raise DataError(
                f"MODEL {name} has a vocabulary of {copied.config.vocab_size:,} tokens and not the 256 bytes of a "
                "text. Give --data a .npy file of tokens."
            )
        return list(text)

    def decode(tokens: list[int]) -> bytes:
        return bytes(tokens) if pairs is None else pairs.decode(tokens).encode()

    return LanguageModel(
        name=name,
        module=copied,
        run=copied,
        blocks=tuple(copied.stack.blocks),
        encode=encode,
        vocab_size=copied.config.vocab_size,
        max_length=copied.config.max_length if copied.config.positions == "learned" else None,
        trained_length=copied.config.max_length,
        decode=decode if known else None,
        token_bytes=reader.token_bytes if known else None,
        tokenizer=tokenizer if known else None,
    )


def token_windows(
    model: LanguageModel, data: str | None, *, length: int, count: int, field: str | None = None
) -> Tensor:
    """Cut windows (count, length) of tokens, evenly spread over a text; fewer if they would overlap.

    Of a long text nothing but the windows and what is around them is encoded.

    data : None for Python's own sources, or what `--data` of a comparison takes
    """
    require_known_length(model, length)
    source = resolve_source("stdlib" if data is None else data)
    if source_kind(source) in ("tokens", "shards"):
        return spread_windows(text_tokens(model, data, field=field), data, length=length, count=count)
    text = _read_text(source, field)
    if len(text) > _LONG_TEXT * length * count:
        windows = _windows_of_long_text(model, text, length=length, count=count)
        _require_known_tokens(windows.reshape(-1), model, data)
        if len(windows):
            return torch.from_numpy(windows)
    return spread_windows(_encode_text(model, text, data), data, length=length, count=count)


def spread_windows(tokens: TokenStream, data: str | None, *, length: int, count: int) -> Tensor:
    """Cut windows (count, length) of tokens (n,), evenly spread; fewer if they would overlap.

    data : where the tokens are from, for the error if there are too few for one window
    """
    if len(tokens) < length:
        raise DataError(
            f"--data {data} has {len(tokens):,} tokens and --length {length} needs as many. Give more text."
        )
    available = len(tokens) // length
    rows = np.arange(min(count, available)) * available // min(count, available)
    return torch.from_numpy(tokens[rows[:, None] * length + np.arange(length)].astype(np.int64))


def _windows_of_long_text(model: LanguageModel, text: bytes, *, length: int, count: int) -> NDArray[np.int64]:
    """Cut a text into equal stretches, and a window where each of them begins; none of one with too few tokens."""
    bounds = [character_start(text, row * len(text) // count) for row in range(count + 1)]
    found = [_tokens_after(model, text, start, stop, length) for start, stop in pairwise(bounds)]
    windows = [tokens for tokens in found if len(tokens) == length]
    return np.array(windows, dtype=np.int64).reshape(-1, length)


def _tokens_after(model: LanguageModel, text: bytes, start: int, stop: int, length: int) -> list[int]:
    """Return `length` tokens that follow a place of a text before another place; fewer if there are fewer."""
    num_bytes = _BYTES_PER_TOKEN * (length + 2 * _CUT_TOKENS)
    while True:
        tokens = model.encode(text[start : min(start + num_bytes, stop)])[_CUT_TOKENS:-_CUT_TOKENS]
        if len(tokens) >= length or start + num_bytes >= stop:
            return tokens[:length]
        num_bytes *= 2


def text_tokens(model: LanguageModel, data: str | None, *, field: str | None = None) -> TokenStream:
    """Return the tokens (count,) of a text in a dtype that just holds the vocabulary; of a file or of shards, mapped.

    data : None for Python's own sources, or what `--data` of a comparison takes; of shards that are made by the
           model's own tokenizer all tokens, those that are held out in training among them
    """
    source = resolve_source("stdlib" if data is None else data)
    kind = source_kind(source)
    if kind not in ("tokens", "shards"):
        return _encode_text(model, _read_text(source, field), data)
    if field is not None:
        raise DataError(f"--field {field} is for text, and --data {data} holds tokens already; leave it out.")
    if kind == "shards":
        return _shard_tokens(model, Path(source), data)
    tokens = read_tokens(source).tokens
    _require_known_tokens(tokens, model, data)
    return tokens


def _shard_tokens(model: LanguageModel, folder: Path, data: str | None) -> TokenStream:
    index = read_index(folder)
    _require_own_tokenizer(model, tokenizer_text(folder, index), data)
    require_whole_shards(folder, index)
    return open_whole_shards(folder, index)


def _require_own_tokenizer(model: LanguageModel, pairs: str, data: str | None) -> None:
    """Refuse tokens that another tokenizer than the model's has made.

    pairs : the byte pairs that have made them, as JSON; empty for bytes
    """
    own, remedy = model.tokenizer, "Give the text itself"
    if own is not None:
        if own == pairs or (own and pairs and portable_tokenizer(own) == portable_tokenizer(pairs)):
            return
        folder = Path(model.place) if Path(model.place).is_dir() else Path(model.place).parent
        spelled = folder / "tokenizer.json" if own else "bytes"
        remedy = f"{remedy}, or make other shards of it: tidegate tokenize TEXT --tokenizer {spelled} --out OTHER"
    raise DataError(f"--data {data} has tokens of another tokenizer than that of MODEL {model.name}. {remedy}.")


def _read_text(source: str, field: str | None) -> bytes:
    return b"\n".join(document.content for document in read_corpus(source, field).documents)


def _encode_text(model: LanguageModel, text: bytes, data: str | None) -> NDArray[np.integer[Any]]:
    parts: list[NDArray[np.integer[Any]]] = []
    for piece in slices(text, _ENCODED_BYTES):
        tokens = np.asarray(model.encode(text[piece]), dtype=np.int64)
        _require_known_tokens(tokens, model, data)
        parts.append(tokens.astype(np.min_scalar_type(model.vocab_size - 1)))
    return np.concatenate(parts)


def require_known_length(model: LanguageModel, length: int) -> None:
    """Refuse sequences of more tokens than the model has positions for."""
    if model.max_length is not None and length > model.max_length:
        raise DataError(f"--length {length} is more than the {model.max_length} positions that {model.name} knows.")


def _require_known_tokens(tokens: NDArray[np.integer[Any]], model: LanguageModel, data: str | None) -> None:
    if len(tokens) and int(tokens.max()) >= model.vocab_size:
        raise DataError(
            f"--data {data} has the token {int(tokens.max()):,} and {model.name} knows {model.vocab_size:,}, from 0 "
            "on. Give tokens of the model's own vocabulary."
        )


def _ours(path: Path, derivatives: bool) -> LanguageModel:
    model = load_model(path)
    if not isinstance(model, TransformerLM):
        raise ValueError(f"MODEL {path} is a {type(model).__name__}; only language models are taken here.")
    name = path.parent.name if path.name == "model.safetensors" else path.stem
    return language_model_of(model, name=name, derivatives=derivatives, tokenizer=tokenizer_beside(path, model))


def tokenizer_beside(path: Path, model: TransformerLM) -> str:
    """Return the tokenizer that lies beside a model of `tidegate train`; empty if there is none."""
    file = path.parent / "tokenizer.json"
    if path.name != "model.safetensors" or not file.exists():
        return ""
    if kind := irregular_kind(file):
        raise ValueError(f"{file} is {kind} and no file. Remove it.")
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        num_tokens = len(read_tokenizer(text, model.config.vocab_size).token_bytes)
    # The library has no class of its own for what it cannot parse.
    except Exception as problem:
        raise ValueError(
            f"{file} is no tokenizer: {problem}. Bring back the one that the model was trained with."
        ) from None
    if num_tokens > model.config.vocab_size:
        raise ValueError(
            f"{file} has {num_tokens:,} tokens, and the model beside it {model.config.vocab_size:,}: it is another "
            "model's. Bring back the one that the model was trained with."
        )
    return text


def _from_hugging_face(folder: Path, derivatives: bool, gates: str | Path | None) -> LanguageModel:
    # It makes transformers know our own class.
    hf: Any = import_module("tidegate.torch.hf")
    if gates is None and import_module("tidegate.torch.retrofit.folder").has_gates(folder):
        gates = folder
    exact = derivatives and gates is None
    attention = "eager" if derivatives else None
    model, unread = load_from_folder(folder, attention=attention, dtype=torch.float64 if exact else None)
    if gates is not None:
        if not Path(gates).is_dir():
            raise ValueError(f"--gates {gates} is no folder. Name one that save_gates wrote.")
        require_regular_files(Path(gates), "--gates")
        # They fit the model in its own dtype alone.
        import_module("tidegate.torch.retrofit").load_gates(model, gates)
        model = model.double() if derivatives else model
    else:
        _require_no_gates(folder, unread)
    config: Any = model.config.get_text_config()
    for name in ("vocab_size", "num_hidden_layers"):
        if not hasattr(config, name):
            raise ValueError(f"MODEL {folder} has no {name} in its configuration, which is needed here.")
    # The logits are not needed, and may take more memory than all else.
    fewer = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}

    # It is read when there is a text, and once.
    tokenizer = cache(partial(load_tokenizer, folder))

    def encode(text: bytes) -> list[int]:
        # Without a tokenizer a vocabulary of 256 is one of bytes, as that of our own models.
        if config.vocab_size == 256 and not any(folder.glob("tokenizer*")):
            return list(text)
        try:
            return tokenizer()(text.decode("utf-8", errors="replace"))
        except ValueError as problem:
            raise DataError(f"{problem} Put its files there, or give --data a .npy file of tokens.") from problem

    name = folder.resolve().name
    if gates is None and isinstance(model, hf.TidegateForCausalLM):
        return _from_our_class(hf.to_transformer_lm(model), folder, name, encode, derivatives, unread)
    return LanguageModel(
        name=name,
        module=model,
        run=lambda tokens: model(input_ids=tokens, use_cache=False, **fewer),
        blocks=_blocks(model, config.num_hidden_layers, folder),
        encode=encode,
        vocab_size=config.vocab_size,
        max_length=getattr(config, "max_position_embeddings", None),
        unread=unread,
    )


def _from_our_class(
    model: TransformerLM, folder: Path, name: str, encode: Encode, derivatives: bool, unread: tuple[str, ...]
) -> LanguageModel:
    """Wrap one of ours that was written for transformers; with a foreign tokenizer the text of tokens is not known."""
    pairs = tokenizer_beside(folder / "model.safetensors", model) if _holds_byte_pairs(folder) else ""
    own = replace(language_model_of(model, name=name, derivatives=derivatives, tokenizer=pairs), unread=unread)
    if pairs:
        return own
    if any(folder.glob("tokenizer*")):
        return replace(own, encode=encode, decode=None, token_bytes=None, tokenizer=None)
    return replace(own, encode=encode)


def _holds_byte_pairs(folder: Path) -> bool:
    """Whether a folder has a tokenizer such as `tidegate export` writes: byte pairs, and no token besides."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return False
    try:
        found: Any = read_json(file.read_bytes())
        kinds = found["model"]["type"], found["pre_tokenizer"]["type"], found["decoder"]["type"]
        return kinds == ("BPE", "ByteLevel", "ByteLevel") and not found["added_tokens"] and not found["normalizer"]
    except (ValueError, KeyError, TypeError):
        return False


def _require_no_gates(folder: Path, unread: tuple[str, ...]) -> None:
    """Refuse a model that was loaded without gates although its folder says that it has some."""
    if any("attn_gate" in name.split(".") for name in unread):
        raise ValueError(
            f"MODEL {folder} has weights of gates that its class does not know, and would run without them. Write the "
            "gates with tidegate.torch.retrofit.save_gates(model, DIR), and give --gates DIR; or load the folder by "
            "load_pretrained of tidegate.torch.retrofit and write it again by its save_pretrained."
        )
    if says_gated(folder):
        raise ValueError(
            f"MODEL {folder} was saved with gates, and gates.json is missing: it would run without them. Write it "
            "again by save_pretrained of tidegate.torch, or give --gates DIR with the gates of save_gates. To measure "
            "it without gates, load it by from_pretrained of transformers, with variant='without_gates' if its weights "
            "are named so, delete model.config.tidegate_gates and write the model into another folder."
        )


def _blocks(model: nn.Module, count: int, folder: Path) -> tuple[nn.Module, ...]:
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count > 0:
            return tuple(module)
    raise ValueError(f"MODEL {folder} has no list of {count} blocks, as its config.json says.")
