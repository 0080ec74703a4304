import copy
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from damage import flip_inside
from errors import rejects
from numpy.lib.stride_tricks import sliding_window_view
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tidegate import InputError
from tidegate.lab.models.export import export_hugging_face
from tidegate.lab.models.language_models import load_language_model, make_language_model, text_tokens, token_windows
from tidegate.lab.observe.run import model_observation
from tidegate.lab.tasks.documents import Document
from tidegate.lab.tasks.tokenizer import portable_tokenizer, trained_tokenizer
from tidegate.lab.tasks.tokenizing import tokenize
from tidegate.torch import (
    TransformerConfig,
    TransformerLM,
    VisionConfig,
    VisionTransformer,
    gate_parameters,
    load_model,
    save_model,
)
from tidegate.torch.hf import from_transformer_lm
from tidegate.torch.retrofit import add_gates, save_gates, save_pretrained


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("ours") / "model.safetensors"
    torch.manual_seed(0)
    save_model(TransformerLM(TransformerConfig(d_model=16, num_layers=2, num_heads=2)), path)
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=8, max_position_embeddings=32, **sizes)).bfloat16().save_pretrained(folder)
    words = {word: number for number, word in enumerate(["the", "sea", "rises", "and", "gate", "falls", "?"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return folder


def test_a_model_is_in_float64_and_without_fused_kernels_for_derivatives_alone(saved, llama):
    exact, own = (load_language_model(llama, derivatives=derivatives).module for derivatives in (True, False))
    assert (exact.dtype, exact.config._attn_implementation) == (torch.float64, "eager")
    assert (own.dtype, own.config._attn_implementation) == (torch.bfloat16, "sdpa")
    exact, own = (load_language_model(saved, derivatives=derivatives).module for derivatives in (True, False))
    assert {parameter.dtype for parameter in exact.parameters()} == {torch.float64}
    assert {parameter.dtype for parameter in own.parameters()} == {torch.float32}


def test_a_model_without_fused_kernels_is_loaded_as_it_is(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    GptOssForCausalLM(GptOssConfig(vocab_size=8, **sizes, **heads)).save_pretrained(tmp_path)
    model = load_language_model(tmp_path, derivatives=False)
    assert model.module.config._attn_implementation == "eager"
    found = model_observation(model, torch.zeros(2, 5, dtype=torch.int64), batch_size=2)
    assert {moments.count for moments in found.layers[0].heads["sink"]} == {2 * 4}


def test_a_loaded_model_is_ready_for_batches_and_reads_text(saved, llama, tmp_path):
    (saved.parent / "._model.safetensors").write_bytes(b"a hidden file of macOS")
    for path in (saved, saved.parent, llama):
        model = load_language_model(path, derivatives=False)
        assert not model.module.training
        result = model.run(torch.zeros(3, 5, dtype=torch.int64))
    # Unused logits are not computed.
    assert result.logits.shape == (3, 1, 8)
    (tmp_path / "notes.txt").write_text("the sea rises and the gate falls\n" * 4)
    windows = token_windows(model, str(tmp_path / "notes.txt"), length=7, count=2)
    assert windows.tolist() == [[0, 1, 2, 3, 0, 4, 5]] * 2


@pytest.fixture(scope="module")
def gated(llama, tmp_path_factory):
    """A model with added gates, its folder as transformers writes it, and the folder of its gates."""
    place = tmp_path_factory.mktemp("gated")
    model = LlamaForCausalLM.from_pretrained(llama).eval()
    add_gates(model, "g1")
    torch.manual_seed(1)
    for parameter in gate_parameters(model):
        parameter.data.normal_()
    model.save_pretrained(place / "model")
    save_gates(model, place / "gates")
    return model, place / "model", place / "gates"


def test_gates_that_would_be_ignored_or_do_not_apply_are_rejected(gated, saved):
    _, folder, gates = gated
    with rejects("model", hint="save_gates"):
        load_language_model(folder)
    with rejects("gates"):
        load_language_model(saved, gates=gates)


@pytest.mark.parametrize("derivatives", [True, False])
def test_a_model_is_loaded_with_its_gates_given_or_in_its_folder(gated, llama, tmp_path, derivatives):
    model, folder, gates = gated
    save_pretrained(model, tmp_path)
    tokens = torch.arange(8)[None]
    own = copy.deepcopy(model).double() if derivatives else model
    expected = own(tokens, logits_to_keep=1).logits
    for place, given in ((folder, gates), (llama, gates), (tmp_path, None)):
        loaded = load_language_model(place, derivatives=derivatives, gates=given)
        assert loaded.module.dtype == expected.dtype
        assert torch.allclose(loaded.run(tokens).logits, expected, rtol=1e-2 if expected.dtype.itemsize == 2 else 1e-6)
    bare = load_language_model(llama, derivatives=derivatives)
    assert not torch.allclose(bare.run(tokens).logits, expected, rtol=1e-2)
    (tmp_path / "gates.safetensors").unlink()
    with pytest.raises(InputError):
        load_language_model(tmp_path, derivatives=derivatives)


@pytest.mark.parametrize("sign", ["configuration", "name of the weights"])
def test_a_folder_that_lost_its_gates_is_rejected_with_a_remedy(gated, tmp_path, sign):
    model, _, gates = gated
    save_pretrained(model, tmp_path)
    (tmp_path / "gates.json").unlink()
    if sign == "configuration":
        (tmp_path / "model.without_gates.safetensors").rename(tmp_path / "model.safetensors")
    else:
        config = tmp_path / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"tidegate_gates": {}}))
    with rejects("model", hint="save_gates as gates"):
        load_language_model(tmp_path)
    assert list(gate_parameters(load_language_model(tmp_path, gates=gates).module))


def test_a_gated_model_can_be_loaded_without_its_gates(gated, llama, tmp_path):
    save_pretrained(gated[0], tmp_path / "gated")
    plain = LlamaForCausalLM.from_pretrained(tmp_path / "gated", variant="without_gates")
    del plain.config.tidegate_gates
    plain.save_pretrained(tmp_path / "plain")
    tokens = torch.arange(8)[None]
    found, expected = (load_language_model(folder).run(tokens).logits for folder in (tmp_path / "plain", llama))
    assert torch.equal(found, expected)


def test_loading_shows_no_bar_and_leaves_the_bars_of_others_alone(llama, capfd):
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    load_language_model(llama)
    assert capfd.readouterr().err == ""
    assert logging.is_progress_bar_enabled() == before


def test_damaged_weights_tokens_beyond_the_vocabulary_and_image_models_are_rejected(tmp_path, llama):
    copied = shutil.copytree(llama, tmp_path / "copied")
    (copied / "model.safetensors").write_bytes(b"no tensors")
    with rejects("model"):
        load_language_model(copied)
    np.save(tmp_path / "tokens.npy", np.arange(9, dtype=np.uint8))
    with rejects("data"):
        token_windows(load_language_model(llama), str(tmp_path / "tokens.npy"), length=4, count=1)
    save_model(VisionTransformer(VisionConfig(d_model=16, num_layers=1, num_heads=2)), tmp_path / "i.safetensors")
    with rejects("model"):
        load_language_model(tmp_path / "i.safetensors")


@pytest.mark.parametrize("derivatives", [True, False])
def test_a_folder_of_our_own_class_is_our_model_with_its_byte_pairs(tmp_path, derivatives):
    text = "the sea rises and the gate falls\n" * 4
    pairs = portable_tokenizer(trained_tokenizer([Document("notes", text.encode())], 270).merges.to_str())
    torch.manual_seed(0)
    model = TransformerLM(TransformerConfig(gate="g1", d_model=16, num_layers=2, num_heads=2, vocab_size=270))
    export_hugging_face(model, tmp_path, tokenizer=pairs)
    loaded = load_language_model(tmp_path, derivatives=derivatives)
    expected = make_language_model(model, name="m", derivatives=derivatives, tokenizer=pairs)
    tokens = loaded.encode(text.encode())
    assert tokens == expected.encode(text.encode())
    assert loaded.decode(tokens).decode() == text
    assert loaded.token_bytes.tolist() == expected.token_bytes.tolist()
    assert torch.equal(loaded.run(torch.tensor([tokens])), expected.run(torch.tensor([tokens])))
    # Another kind of tokenizer is loaded by transformers, without lengths in bytes.
    words = Tokenizer(models.WordLevel({"the": 0, "sea": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    other = load_language_model(tmp_path, derivatives=derivatives)
    assert other.encode(b"sea the") == [1, 0]
    assert other.decode is None
    assert other.token_bytes is None


def test_a_model_without_a_tokenizer_reads_bytes_if_it_has_256_tokens(tmp_path, saved, llama):
    (tmp_path / "notes.txt").write_text("the sea")
    from_transformer_lm(load_model(saved)).save_pretrained(tmp_path / "ours")
    windows = token_windows(load_language_model(tmp_path / "ours"), str(tmp_path / "notes.txt"), length=7, count=1)
    assert windows.tolist() == [list(b"the sea")]
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((llama / name).read_bytes())
    with rejects("model", hint="Put the tokenizer's files there"):
        token_windows(load_language_model(bare), str(tmp_path / "notes.txt"), length=1, count=1)


LONG_TEXT = "".join(f"{number:05} rísing\n" for number in range(6000)).encode()
"""Far more than four windows of 24 tokens, with a different number in each line."""


def byte_pair_model(text):
    pairs = portable_tokenizer(trained_tokenizer((Document("notes", text[:4000]),), 300).merges.to_str())
    decoder = TransformerLM(TransformerConfig(d_model=16, num_layers=1, num_heads=2, vocab_size=300))
    return make_language_model(decoder, name="pairs", tokenizer=pairs)


@pytest.mark.parametrize("make", [lambda saved: load_language_model(saved), lambda _: byte_pair_model(LONG_TEXT)])
def test_windows_of_a_long_text_are_windows_of_all_its_tokens_one_in_each_quarter(make, saved, tmp_path):
    model, data = make(saved), str(tmp_path / "notes.txt")
    (tmp_path / "notes.txt").write_bytes(LONG_TEXT)
    windows = token_windows(model, data, length=24, count=4)
    whole = text_tokens(model, data)
    rows = [np.flatnonzero((sliding_window_view(whole, 24) == window).all(axis=1)) for window in windows.numpy()]
    # Each occurs once in the whole text, near the start of its quarter.
    places = np.concatenate(rows) / len(whole)
    assert len(windows) == len(places) == 4
    assert np.abs(places - np.arange(4) / 4).max() < 0.05
    assert torch.equal(windows, token_windows(model, data, length=24, count=4))


def test_a_part_of_a_long_text_with_too_few_tokens_has_no_window(saved, tmp_path):
    """A token of this tokenizer is a line, of whatever length."""
    model = replace(load_language_model(saved), encode=lambda text: list(range(text.count(b"\n"))))
    path = tmp_path / "notes.txt"
    path.write_bytes(b"short\n" * 100 + b"x" * 40_000)
    assert token_windows(model, str(path), length=8, count=2).tolist() == [list(range(16, 24))]
    # Lines at the ends of the text are used if there are no others.
    path.write_bytes(b"short\n" * 10 + b"x" * 40_000)
    assert token_windows(model, str(path), length=8, count=2).tolist() == [list(range(8))]
    with rejects("data", hint="Give more text"):
        token_windows(model, str(path), length=16, count=2)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Folders of several shards of one text, named by their tokenizer."""
    place = tmp_path_factory.mktemp("shards")
    (place / "notes.txt").write_bytes(LONG_TEXT)
    for tokenizer in ("bytes", "bpe:300", "bpe:280"):
        index = tokenize(str(place / "notes.txt"), place / tokenizer, tokenizer=tokenizer, shard_bytes=10_000)
        assert len(index.shards) > 2
    return place


@pytest.fixture(scope="module")
def pairs_model(shards, tmp_path_factory):
    """A model with the tokenizer of 300 byte pairs, as `tidegate train` saves it."""
    place = tmp_path_factory.mktemp("pairs")
    decoder = TransformerLM(TransformerConfig(d_model=16, num_layers=1, num_heads=2, vocab_size=300))
    save_model(decoder, place / "model.safetensors")
    (place / "tokenizer.json").write_bytes((shards / "bpe:300" / "tokenizer.json").read_bytes())
    return place


def test_shards_are_read_as_the_whole_text_by_a_model_of_the_same_tokenizer(shards, saved, pairs_model):
    for model, tokenizer in ((saved, "bytes"), (pairs_model, "bpe:300")):
        loaded = load_language_model(model, derivatives=False)
        tokens = text_tokens(loaded, str(shards / tokenizer))
        assert loaded.decode(tokens[np.arange(len(tokens))].tolist()) == LONG_TEXT
        windows = token_windows(loaded, str(shards / tokenizer), length=24, count=4)
        available = len(tokens) // 24
        starts = np.arange(4) * available // 4 * 24
        assert windows.tolist() == tokens[starts[:, None] + np.arange(24)].tolist()
        # There are fewer windows if they would overlap.
        assert len(token_windows(loaded, str(shards / tokenizer), length=len(tokens) // 2, count=4)) == 2


def test_shards_of_another_tokenizer_are_rejected_with_a_remedy(shards, saved, pairs_model, llama):
    rejected = [
        (saved, "bpe:300", "with the tokenizer bytes."),
        (pairs_model, "bytes", f"with the tokenizer {pairs_model / 'tokenizer.json'}."),
        (pairs_model / "model.safetensors", "bpe:280", f"with the tokenizer {pairs_model / 'tokenizer.json'}."),
        (llama, "bytes", "Pass the text itself."),
    ]
    for model, tokenizer, hint in rejected:
        with rejects("data", hint=hint):
            text_tokens(load_language_model(model, derivatives=False), str(shards / tokenizer))


def test_damaged_shards_and_a_field_for_shards_are_rejected(shards, saved, tmp_path):
    copied = shutil.copytree(shards / "bytes", tmp_path / "copied")
    model = load_language_model(saved)
    with rejects("field"):
        text_tokens(model, str(copied), field="body")
    flip_inside(copied / "00001.bin")
    with rejects("data", hint="00001.bin"):
        text_tokens(model, str(copied))
