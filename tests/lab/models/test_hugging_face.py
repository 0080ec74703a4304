import json
import os
import pickle
import resource
import shutil
import sys
import time
from contextlib import suppress

import numpy as np
import pytest
import torch
from errors import rejects
from huggingface_hub import constants
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from typer.testing import CliRunner

from tidegate import InputError
from tidegate.cli import app
from tidegate.lab.models.hugging_face import _FILE_LISTS, _MOST_COUNTED, _counts
from tidegate.lab.models.language_models import load_language_model, token_windows

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 8,
    "max_position_embeddings": 32,
}
DEEP = "[" * 200_000


def kept(tensors, *names):
    return {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(place / "llama")
    LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)).save_pretrained(
        place / "tied_shards", max_shard_size="3KB"
    )
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=8, n_positions=32)).save_pretrained(
        place / "gpt2"
    )
    Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)).bfloat16().save_pretrained(place / "qwen")
    return place


@pytest.fixture
def changed(models, tmp_path):
    """Copies a folder, with some options and tensors changed."""

    def change(name="llama", tensors=None, files=(), **options):
        folder = tmp_path / "model"
        shutil.copytree(models / name, folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **options}))
        if tensors is not None:
            weights = load_file(models / name / "model.safetensors")
            save_file(tensors(weights), folder / "model.safetensors", metadata={"format": "pt"})
        for file, content in dict(files).items():
            (folder / file).write_text(content)
        return folder

    return change


@pytest.mark.parametrize("name", ["llama", "tied_shards", "gpt2", "qwen"])
def test_a_whole_folder_is_the_model_that_was_saved(models, name):
    classes = {"gpt2": GPT2LMHeadModel, "qwen": Qwen3ForCausalLM}
    saved = classes.get(name, LlamaForCausalLM).from_pretrained(models / name)
    loaded = load_language_model(models / name, derivatives=False)
    assert loaded.unread == ()
    assert loaded.module.dtype == saved.dtype
    assert loaded.module.state_dict().keys() == saved.state_dict().keys()
    for tensor, expected in zip(loaded.module.state_dict().values(), saved.state_dict().values(), strict=True):
        assert torch.equal(tensor, expected)
    tokens = torch.arange(8)[None]
    assert torch.equal(loaded.module(tokens).logits, saved(tokens).logits)


@pytest.mark.parametrize("verb", ["observe", "curvature"])
def test_a_missing_tensor_is_named_and_no_page_is_written(changed, tmp_path, verb):
    folder = changed(tensors=lambda own: kept(own, "model.layers.1.self_attn.q_proj.weight"))
    np.save(tmp_path / "tokens.npy", np.zeros(40, dtype=np.uint8))
    done = CliRunner().invoke(
        app, [verb, str(folder), "--data", str(tmp_path / "tokens.npy"), "--length", "8", "--out", str(tmp_path / "o")]
    )
    assert done.exit_code == 2
    assert "random: model.layers.1.self_attn.q_proj.weight." in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "o").exists()


MISFITS = {
    "another width": ({"hidden_size": 32}, "lm_head.weight is (8, 16), not (8, 32)"),
    "a layer more": ({"num_hidden_layers": 3}, "random: model.layers.2.input_layernorm"),
    "a layer less": ({"num_hidden_layers": 1}, "ignored: model.layers.1.input_layernorm"),
    "no layers": ({"num_hidden_layers": 0}, ""),
    "no heads": ({"num_attention_heads": 0}, "ZeroDivisionError"),
    "no number": ({"rms_norm_eps": "x"}, "rms_norm_eps"),
    "another class": ({"model_type": "bert"}, "random: bert"),
    "a class without language": ({"model_type": "vit"}, ""),
    "no class": ({"model_type": 7}, "model_type"),
}


@pytest.mark.parametrize(("options", "hint"), MISFITS.values(), ids=MISFITS)
def test_a_configuration_that_does_not_fit_the_weights_is_rejected_with_the_reason(changed, options, hint):
    with rejects("model", hint=hint):
        load_language_model(changed(**options), derivatives=False)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
def test_weights_that_are_not_real_numbers_are_rejected(changed, dtype):
    folder = changed(tensors=lambda own: {name: tensor.to(dtype) for name, tensor in own.items()})
    with rejects("model", hint=f"model.embed_tokens.weight is {dtype}, not torch.float32"):
        load_language_model(folder, derivatives=False)


def test_unused_tensors_are_reported_without_control_characters(changed, tmp_path):
    folder = changed(tensors=lambda own: {**own, "tower\x1b[31m": torch.zeros(1)})
    assert load_language_model(folder, derivatives=False).unread == ("tower\x1b[31m",)
    np.save(tmp_path / "tokens.npy", np.zeros(40, dtype=np.uint8))
    options = ["--data", tmp_path / "tokens.npy", "--length", "8", "--out", tmp_path / "out", "--quiet"]
    done = CliRunner().invoke(app, ["observe", str(folder), *map(str, options)])
    assert done.exit_code == 0, done.output
    assert done.stderr.endswith("tower\\u001b[31m.\n")
    assert done.stderr.count("\n") == 1


HUGE = [
    *(("llama", name, 10**6) for name in ("num_hidden_layers", "hidden_size", "vocab_size")),
    ("llama", "hidden_size", 10**18),
    ("llama", "num_labels", 10**9),
    ("llama", "head_dim", 10**30),
    ("qwen", "num_hidden_layers", 4096),
    ("gpt2", "n_positions", 10**7),
]


@pytest.mark.parametrize(("model", "name", "size"), HUGE)
def test_huge_sizes_are_rejected_at_once_and_without_memory(changed, model, name, size):
    folder = changed(model, **{name: size}, **({"layer_types": None} if model == "qwen" else {}))
    start, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError):
        load_language_model(folder, derivatives=False)
    # Building such a model takes minutes, even without memory for its weights.
    assert time.process_time() - start < 30
    # Kilobytes on Linux, bytes on macOS.
    most = 100_000 * (1024 if sys.platform == "darwin" else 1)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < most


@pytest.mark.full
def test_no_language_model_counts_too_many_by_its_own_defaults():
    counts = []
    for kind in CONFIG_MAPPING:
        # Some configurations reject their own defaults.
        with suppress(StrictDataclassError):
            if CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING:
                counts += [(kind, *count) for count in _counts(CONFIG_MAPPING[kind]().to_dict())]
    assert len({kind for kind, *_ in counts}) > 100
    assert [count for count in counts if count[2] > _MOST_COUNTED] == []


def test_lists_of_numbers_are_counted_too(changed):
    with rejects("attention_types", hint="config.json"):
        load_language_model(changed(model_type="gpt_neo", attention_types=[[["global"], 10**9]]))


def test_a_model_that_is_built_elsewhere_is_not_bounded_afterwards(changed):
    with rejects("model", hint=" numbers"):
        load_language_model(changed(vocab_size=10**7))
    assert torch.nn.Embedding(10**7, 10, device="meta").weight.numel() == 10**8


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("config.json", f'{{"model_type": {DEEP[:900]}{"]" * 900}}}', rejects("model", hint="model_type")),
        ("config.json", DEEP, rejects("config.json", hint="nested too deeply")),
        ("config.json", "[]", rejects("model", hint="JSON object")),
        ("adapter_config.json", "{}", rejects("model", hint="Merge the adapter")),
    ],
    ids=["as deep as can be read", "nested without end", "a list", "an adapter"],
)
def test_files_that_cannot_be_used_are_rejected(changed, name, content, error):
    with error:
        load_language_model(changed(files={name: content}))


@pytest.mark.parametrize("name", ["../outside.safetensors", "pickle.bin", 7, "\0.safetensors"])
def test_an_index_lists_files_in_its_folder_only(changed, name):
    folder = changed("tied_shards")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["model.norm.weight"] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with rejects("weight_map", hint="model.safetensors.index.json"):
        load_language_model(folder)


def test_a_missing_shard_is_named_and_an_index_nested_without_end_rejected(changed):
    folder = changed("tied_shards")
    lost = sorted(folder.glob("model-*.safetensors"))[1]
    lost.unlink()
    with rejects("model", hint=lost.name):
        load_language_model(folder)
    (folder / "model.safetensors.index.json").write_text(DEEP)
    with rejects("model.safetensors.index.json", hint="nested too deeply"):
        load_language_model(folder)


class Bomb:
    def __reduce__(self):
        return (open, ("executed", "w"))


def test_nothing_in_a_folder_is_executed_unpickled_or_downloaded(changed, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "open('executed', 'w')"
    mapped = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"}
    folder = changed(
        files={"evil.py": code, "modeling_llama.py": code, "custom_generate.py": code},
        auto_map=mapped,
        attn_implementation="evil/kernel",
        _attn_implementation="evil/kernel",
        base_model_name_or_path="evil/base",
    )
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(code)
    (folder / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["evil.T", None]}}))
    offline, forward = [], LlamaForCausalLM.forward

    def noting(*args, **kwargs):
        offline.append(constants.HF_HUB_OFFLINE)
        return forward(*args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", noting)
    loaded = load_language_model(folder, derivatives=False)
    (tmp_path / "notes.txt").write_text("the sea")
    with rejects("model", hint="Put the tokenizer's files there"):
        token_windows(loaded, str(tmp_path / "notes.txt"), length=1, count=1)
    assert offline == [True]
    (folder / "model.safetensors").unlink()
    with rejects("model", hint="Only safetensors"):
        load_language_model(folder)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", ["../elsewhere/tokenizer.4.0.0.json", "..\\elsewhere", 7])
@pytest.mark.parametrize(("file", "option"), _FILE_LISTS)
def test_a_tokenizer_is_read_from_its_folder_only(changed, tmp_path, file, option, name):
    (tmp_path / "notes.txt").write_text("the sea")
    folder = changed()
    model = load_language_model(folder, derivatives=False)
    config = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
    (folder / file).write_text(json.dumps({**config, option: [name]}))
    with rejects(option, hint=file):
        token_windows(model, str(tmp_path / "notes.txt"), length=1, count=1)


def test_a_tokenizer_may_name_files_of_its_folder(changed, tmp_path):
    (tmp_path / "notes.txt").write_text("the sea the sea")
    words = Tokenizer(WordLevel({"the": 0, "sea": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "fast_tokenizer_files": ["tokenizer.4.0.0.json"],
        "init_inputs": [],
    }
    folder = changed(files={"tokenizer.4.0.0.json": words.to_str(), "tokenizer_config.json": json.dumps(settings)})
    model = load_language_model(folder, derivatives=False)
    windows = token_windows(model, str(tmp_path / "notes.txt"), length=4, count=1)
    assert windows.tolist() == [[0, 1, 0, 1]]


@pytest.mark.parametrize(("name", "field"), [("tokenizer.json", "model"), ("tokenizer_config.json",) * 2])
def test_a_tokenizer_nested_without_end_is_rejected(changed, tmp_path, name, field):
    (tmp_path / "notes.txt").write_text("the sea")
    model = load_language_model(changed(files={name: DEEP}), derivatives=False)
    with rejects(field):
        token_windows(model, str(tmp_path / "notes.txt"), length=1, count=1)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pipe_or_a_device_in_a_folder_is_rejected(changed, name):
    folder = changed()
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with rejects("model", hint="named pipe") as error:
        load_language_model(folder)
    assert error.value.got == folder / name
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with rejects("model", hint="device"):
        load_language_model(folder)


def test_a_model_or_gates_that_are_not_files_are_rejected(models, tmp_path):
    os.mkfifo(tmp_path / "gates.json")
    with rejects("gates", hint="named pipe"):
        load_language_model(models / "llama", gates=tmp_path)
    with rejects("model", hint="named pipe"):
        load_language_model(tmp_path / "gates.json")
    with rejects("gates"):
        load_language_model(models / "llama", gates=tmp_path / "gates.json")
