"""Model files and folders made to harm: what they declare, and what loading them would do if it trusted them."""

import json
import pickle
import struct
import time
from pathlib import Path

import transformers.models.llama.modeling_llama
from lab_runs import model_of
from retrofit_models import tiny
from safetensors.torch import load_file, save_file

from tidegate.lab.models.language_models import load_language_model, token_windows
from tidegate.torch import TransformerLM, save_model

# The classes are imported with this module, so that a loader's own time and memory are measured.
assert transformers.models.llama.modeling_llama


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (Path(self.mark),)


def llama(folder):
    """A whole folder of a small model, and the path of its weights."""
    tiny("llama").save_pretrained(folder)
    return folder / "model.safetensors"


def change_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def change_header(path, change):
    """Write a safetensors file again with another header; its digest, if it has one, is that of before."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = change(json.loads(content[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def change_tensors(path, change):
    tensors = load_file(path)
    save_file(change(tensors), path, metadata={"format": "pt"})


def ours(folder, **changes):
    """A file of ours whose configuration declares something else."""
    path = folder / "model.safetensors"
    save_model(TransformerLM(model_of()), path)

    def declare(header):
        config = json.loads(header["__metadata__"]["config"]) | changes
        return header | {"__metadata__": header["__metadata__"] | {"config": json.dumps(config)}}

    change_header(path, declare)


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
    change_tensors(llama(folder), lambda all_: {**all_, "../../../climbed": all_["model.norm.weight"].clone()})


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
    ours(folder)
    nested = {"config": "[" * 100_000}
    change_header(
        folder / "model.safetensors", lambda header: header | {"__metadata__": header["__metadata__"] | nested}
    )


def our_nested_header(folder, mark):
    ours(folder)
    change_header(folder / "model.safetensors", lambda _: b'{"a":' * 100_000)


def empty_file(folder, mark):
    (folder / "model.safetensors").write_bytes(b"")


FOLDERS = {
    function.__name__.replace("_", " "): function
    for function in (
        *(pickled_weights, pickle_named_safetensors, code_by_auto_map, missing_tensor, other_shape, name_that_climbs),
        *(shard_that_climbs, offsets_that_lie, header_that_never_ends, cut_weights, million_layers, giant_width),
        *(giant_vocabulary, nested_config, nested_tokenizer, our_million_layers, our_giant_width),
        *(our_giant_vocabulary, our_nested_metadata, our_nested_header, empty_file),
    )
}
"""Makers of folders by what is wrong with them: each takes the folder and the mark that nothing may leave."""


def load(folder, answer):
    """Load a model and a text for it, as `tidegate observe` does, and write what came of it, how long and how much."""
    resting, start = _bytes("VmRSS"), time.perf_counter()
    Path("/proc/self/clear_refs").write_text("5")
    try:
        token_windows(load_language_model(folder, derivatives=False), None, length=4, count=1)
        came = "loaded"
    except (ValueError, OSError) as problem:
        came = f"refused: {problem}"
    except BaseException as problem:
        came = f"raised {problem!r}"
    seconds, peak = time.perf_counter() - start, _bytes("VmHWM") - resting
    answer.write_text(json.dumps({"came": came, "seconds": seconds, "bytes": peak}))


def _bytes(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024
