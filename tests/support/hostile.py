"""Hostile model files and folders."""

import json
import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import transformers.models.llama.modeling_llama
from damage import change_header, forge_tensors
from lab_runs import model_of
from retrofit_models import tiny
from safetensors.torch import load_file, save_file
from spending import measure_spending

from tidegate.lab.models.language_models import load_language_model, token_windows
from tidegate.torch import TransformerLM, save_model

# Import the classes here, so that only the loader's own time and memory are measured.
assert transformers.models.llama.modeling_llama


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


def million_layers(folder, mark):
    llama(folder)
    change_config(folder, num_hidden_layers=10**6)


def giant_width(folder, mark):
    llama(folder)
    change_config(folder, hidden_size=10**9, intermediate_size=10**9)


def giant_vocabulary(folder, mark):
    llama(folder)
    change_config(folder, vocab_size=10**15)


def nested_config(folder, mark):
    llama(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "a": ' + "[" * 200_000)


def nested_tokenizer(folder, mark):
    llama(folder)
    (folder / "tokenizer.json").write_text("[" * 200_000)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def our_million_layers(folder, mark):
    ours(folder, num_layers=10**6)


def our_giant_width(folder, mark):
    ours(folder, d_model=10**9)


def our_giant_vocabulary(folder, mark):
    ours(folder, vocab_size=10**15)


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
    tokenizes: bool = False
    """Whether to tokenize a text, too."""

    @property
    def name(self):
        return self.make.__name__.replace("_", " ")


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
    Hostile(million_layers, "num_hidden_layers"),
    Hostile(giant_width, "config.json"),
    Hostile(giant_vocabulary, "config.json"),
    Hostile(nested_config, "config.json"),
    Hostile(nested_tokenizer, "tokenizer", tokenizes=True),
    Hostile(our_million_layers, "num_layers"),
    Hostile(our_giant_width, "d_model"),
    Hostile(our_giant_vocabulary, "vocab_size"),
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
