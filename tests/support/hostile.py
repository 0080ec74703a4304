"""Hostile model files and folders."""

import json
import pickle
import struct
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import transformers.models.llama.modeling_llama
from damage import change_header, forge_tensors
from lab_runs import model_of
from retrofit_models import tiny
from safetensors.torch import load_file, save_file

from tidegate.lab.compare.cost import _PEAKS_RESET, _status_bytes
from tidegate.lab.models.language_models import load_language_model, token_windows
from tidegate.torch import TransformerLM, save_model

# Import the classes here, so that only the loader's own time and memory are measured.
assert transformers.models.llama.modeling_llama


@dataclass
class Spent:
    """CPU time and additional memory, set when the block ends."""

    seconds: float = 0.0
    num_bytes: int = 0


@contextmanager
def measure_spending():
    """Measure a block's CPU time, and its peak memory above that at its start."""
    spent, resting = Spent(), _status_bytes("VmRSS")
    _PEAKS_RESET.write_text("5")
    start = time.process_time()
    try:
        yield spent
    finally:
        spent.seconds = time.process_time() - start
        spent.num_bytes = _status_bytes("VmHWM") - resting


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (Path(self.mark),)


def llama(folder):
    """Save a small model in a folder, and return the path of its weights."""
    tiny("llama").save_pretrained(folder)
    return folder / "model.safetensors"


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_tensors(path, change):
    tensors = load_file(path)
    save_file(change(tensors), path, metadata={"format": "pt"})


def ours(folder, **changes):
    """Write a model file of ours with a changed configuration and a valid checksum."""
    path = folder / "model.safetensors"
    config = model_of()
    save_model(TransformerLM(config), path)
    forge_tensors(path, metadata={"config": json.dumps(json.loads(config.to_json()) | changes)})
    return path


def pickled_weights(folder, mark):
    llama(folder).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))


def pickle_named_safetensors(folder, mark):
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb(mark)))


def code_by_auto_map(folder, mark):
    llama(folder)
    (folder / "evil.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()\nclass Evil: pass\n")
    change_config(folder, auto_map={"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}, model_type="evil")


def missing_tensor(folder, mark):
    change_tensors(llama(folder), lambda all_: {n: t for n, t in all_.items() if "layers.1.self_attn.q_proj" not in n})


def other_shape(folder, mark):
    change_tensors(llama(folder), lambda all_: {n: t[:1].clone() if "q_proj" in n else t for n, t in all_.items()})


def name_that_climbs(folder, mark):
    change_tensors(llama(folder), lambda all_: {**all_, "../climbed": all_["model.norm.weight"].clone()})


def shard_that_climbs(folder, mark):
    llama(folder).rename(folder.parent / "outside.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def offsets_that_lie(folder, mark):
    change_header(
        llama(folder),
        lambda header: header | {"model.norm.weight": header["model.norm.weight"] | {"data_offsets": [0, 2**40]}},
    )


def header_that_never_ends(folder, mark):
    path = llama(folder)
    path.write_bytes(struct.pack("<Q", 2**62) + path.read_bytes()[8:])


def cut_weights(folder, mark):
    path = llama(folder)
    path.write_bytes(path.read_bytes()[:-1000])


def config_with(**values):
    """Make a model whose configuration has these values."""
    return lambda folder, mark: (llama(folder), change_config(folder, **values))


def ours_with(**values):
    """Make a model file of ours whose configuration has these values."""
    return lambda folder, mark: ours(folder, **values)


def nested_config(folder, mark):
    llama(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "a": ' + "[" * 200_000)


def nested_tokenizer(folder, mark):
    llama(folder)
    (folder / "tokenizer.json").write_text("[" * 200_000)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def our_nested_metadata(folder, mark):
    forge_tensors(ours(folder), metadata={"config": "[" * 100_000})


def our_nested_header(folder, mark):
    change_header(ours(folder), lambda _: b'{"a":' * 100_000)


def empty_file(folder, mark):
    (folder / "model.safetensors").write_bytes(b"")


@dataclass(frozen=True)
class Hostile:
    """A hostile folder and its expected error."""

    make: Callable[[Path, Path], object]
    """Takes the folder, and a path at which nothing may be created."""
    refusal: str
    """A telling word of the error; empty if the model loads without harm."""
    name: str = ""
    """By default that of the function."""
    tokenizes: bool = False
    """Whether to tokenize a text, too."""

    def __post_init__(self):
        object.__setattr__(self, "name", self.name or self.make.__name__.replace("_", " "))


FOLDERS = (
    Hostile(pickled_weights, "model.safetensors"),
    Hostile(pickle_named_safetensors, "safetensors"),
    Hostile(code_by_auto_map, "'evil'"),
    Hostile(missing_tensor, "layers.1.self_attn.q_proj"),
    Hostile(other_shape, "(1, 32)"),
    Hostile(name_that_climbs, ""),
    Hostile(shard_that_climbs, "weight_map"),
    Hostile(offsets_that_lie, "weights"),
    Hostile(header_that_never_ends, "weights"),
    Hostile(cut_weights, "weights"),
    Hostile(config_with(num_hidden_layers=10**6), "num_hidden_layers", "million layers"),
    Hostile(config_with(hidden_size=10**9, intermediate_size=10**9), "config.json", "giant width"),
    Hostile(config_with(vocab_size=10**15), "config.json", "giant vocabulary"),
    Hostile(nested_config, "config.json"),
    Hostile(nested_tokenizer, "tokenizer", tokenizes=True),
    Hostile(ours_with(num_layers=10**6), "num_layers", "our million layers"),
    Hostile(ours_with(d_model=10**9), "d_model", "our giant width"),
    Hostile(ours_with(vocab_size=10**15), "vocab_size", "our giant vocabulary"),
    Hostile(our_nested_metadata, "JSON"),
    Hostile(our_nested_header, "JSON"),
    Hostile(empty_file, "safetensors"),
)


def load(folder, answer, tokenizes):
    """Load a model, and optionally a text, as `tidegate observe` does; write the outcome and its cost."""
    with measure_spending() as spent:
        try:
            model = load_language_model(folder, derivatives=False)
            if tokenizes:
                token_windows(model, None, length=4, count=1)
            came = "loaded"
        except (ValueError, OSError) as problem:
            came = f"refused: {problem}"
        except BaseException as problem:
            came = f"raised {problem!r}"
    answer.write_text(json.dumps({"came": came, "seconds": spent.seconds, "bytes": spent.num_bytes}))
