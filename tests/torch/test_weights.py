import json
import re

import pytest
import torch
from damage import flip_inside, forge_tensors
from errors import rejects
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from tidegate import PRESETS
from tidegate.config import TransformerConfig, VisionConfig
from tidegate.tensors.rotary import Rotary
from tidegate.torch import weights
from tidegate.torch.decoder import TransformerLM
from tidegate.torch.vit import VisionTransformer
from tidegate.torch.weights import load_model, save_model

SMALL = {"d_model": 24, "num_layers": 2}
TEXT = {
    **{gate: {"gate": gate} for gate in ("none", *PRESETS)},
    "all": {
        "gate": "g1+value:query:r2:b1", "num_kv_heads": 2, "head_dim": 8, "qk_norm": True, "metric": "learned",
        "bias": True, "norm": "layer", "feedforward": "gelu", "rotary": Rotary(fraction=0.5), "tie_embeddings": False,
    },
    "learned": {"positions": "learned"},
}  # fmt: skip


def text_model(dtype=None, **options):
    return TransformerLM(TransformerConfig(**SMALL | options), dtype=dtype)


def vision_model(**options):
    return VisionTransformer(VisionConfig(**SMALL | {"image_size": 8} | options))


def norm_a_projection(model):
    weight_norm(model.stack.blocks[0].attention.v_proj)
    return model


def quantize(model):
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def assert_same(model, again):
    assert type(again) is type(model)
    assert again.config == model.config
    assert list(again.state_dict()) == list(model.state_dict())
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype
        assert other.requires_grad


@pytest.mark.parametrize("options", TEXT.values(), ids=TEXT)
def test_a_saved_language_model_comes_back_bit_by_bit(path, options):
    model = text_model(**options)
    save_model(model, path)
    again = load_model(path)
    assert_same(model, again)
    tokens = torch.arange(12).reshape(2, 6)
    assert torch.equal(again(tokens), model(tokens))


@pytest.mark.parametrize("pooling", ["class", "mean"])
def test_a_saved_vision_model_comes_back_bit_by_bit(path, pooling):
    model = vision_model(pooling=pooling, gate="vga")
    save_model(model, str(path))
    again = load_model(str(path))
    assert_same(model, again)
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(images), model(images))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_dtype_is_kept_or_changed_on_demand(path, dtype):
    model = text_model(dtype=dtype)
    save_model(model, path)
    assert_same(model, load_model(path))
    assert_same(model.float(), load_model(path, dtype=torch.float32))


@pytest.mark.gpu
def test_a_model_is_loaded_onto_a_gpu(path):
    save_model(text_model(), path)
    assert {parameter.device.type for parameter in load_model(path, device="cuda").parameters()} == {"cuda"}


def test_tied_embeddings_are_saved_once(path):
    save_model(text_model(tie_embeddings=True), path)
    names = load_file(path)
    assert "embedding.weight" in names
    assert "head.weight" not in names


def test_the_file_says_what_it_is(path):
    model = text_model(gate="g1")
    save_model(model, path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    assert {name: metadata[name] for name in ("format", "version", "model")} == {
        "format": "tidegate",
        "version": "2",
        "model": "TransformerLM",
    }
    assert json.loads(metadata["config"])["gate"] == "g1"


def test_a_loaded_model_does_not_change_with_its_file(path):
    save_model(text_model(), path)
    model = load_model(path)
    before = [parameter.clone() for parameter in model.parameters()]
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.write(b"\0" * size)
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def with_config(**changes):
    """Return the metadata of `text_model()` with some options changed."""
    config = json.loads(text_model().config.to_json())
    return {"config": json.dumps(config | changes)}


NORM = "stack.norm.weight"
REFUSED = [
    ({"metadata": {"version": "1"}}, "It has version '1'"),
    ({"tensors": {NORM: None}}, f"{NORM} is missing."),
    ({"tensors": {"extra": torch.zeros(1)}}, "extra is unexpected."),
    ({"tensors": {NORM: torch.zeros(3)}}, f"{NORM} has shape (3,), expected (24,)."),
]
REJECTED = [
    ({"metadata": {"model": "Oracle"}}, "It holds a model 'Oracle'.", "TransformerLM or VisionTransformer"),
    ({"metadata": {"model": "VisionTransformer"}}, "must be a field of VisionConfig", ""),
    ({"metadata": {"config": '{"gate": "g9"}'}}, "gate must be a preset or site:reads, got 'g9'.", ""),
    ({"metadata": {"config": "{"}}, "cannot be read: text must be valid JSON", ""),
    (
        {"metadata": {"config": "[" * 100_000}},
        "cannot be read: text must be valid JSON. Lists or objects are nested too",
        "",
    ),
    ({"metadata": {"config": '{"dropout": "much"}'}}, "cannot be read: ", ""),
    ({"metadata": {"config": '{"gate": "%s"}' % ("x" * 10**6)}}, "cannot be read: gate must be", ""),
    ({"tensors": {NORM: torch.zeros(24, dtype=torch.int32)}}, f"{NORM} of the type I32", "F64, F32, F16, BF16"),
]


@pytest.mark.parametrize(("changes", "hint", "expected"), REJECTED, ids=[row[1] for row in REJECTED])
def test_a_file_of_another_model_is_rejected_with_its_path_and_shortly(path, changes, hint, expected):
    save_model(text_model(), path)
    forge_tensors(path, **changes)
    with rejects("path", hint=hint) as caught:
        load_model(path)
    assert str(path) in str(caught.value)
    assert expected in caught.value.expected
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[row[1] for row in REFUSED])
def test_a_file_that_does_not_fit_is_refused_by_name_and_shortly(path, changes, message):
    save_model(text_model(), path)
    forge_tensors(path, **changes)
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        load_model(path)
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < 1000


BOUNDLESS = [
    ({"num_layers": 10**6}, "num_layers is 1,000,000, and it has tensors of 2 blocks"),
    ({"d_model": 10**9, "head_dim": 6}, "d_model is 1,000,000,000, and its largest tensor has 6,144 numbers"),
    ({"vocab_size": 10**15}, "vocab_size is 1,000,000,000,000,000, and its largest tensor has 6,144 numbers"),
    ({"vocab_size": 10**40}, "vocab_size is 10,000,"),
    ({"head_dim": 10**12}, "head_dim is 1,000,000,000,000, and"),
    ({"d_ff": 10**12}, "d_ff is 1,000,000,000,000, and"),
    ({"d_ff": [64, 10**12]}, "d_ff is 1,000,000,000,000, and"),
    ({"positions": "learned", "max_length": 10**12}, "max_length is 1,000,000,000,000, and"),
    (
        {"gate": "g1:r1000000000".replace("g1", "output:input")},
        "rank of output:input:r1000000000 is 1,000,000,000, and",
    ),
]
SHAPES = {"num_heads": 6000, "num_kv_heads": 1, "head_dim": 6000}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        *((changes, rejects("path", hint=hint)) for changes, hint in BOUNDLESS),
        (SHAPES, pytest.raises(ValueError, match="configuration")),
    ],
    ids=[*(row[1] for row in BOUNDLESS), "shapes"],
)
def test_sizes_that_the_file_does_not_have_are_refused_before_anything_is_built(path, changes, expected, monkeypatch):
    save_model(text_model(), path)
    forge_tensors(path, metadata=with_config(**changes))
    built = []

    def build(config):
        built.append(config.num_layers)
        return original(config)

    original = weights._build_on_meta
    monkeypatch.setattr(weights, "_build_on_meta", build)
    with expected:
        load_model(path)
    # At most a model of one block, for the shapes of a block.
    assert set(built) <= {1}


def test_blocks_that_are_there_by_name_alone_are_refused_shortly(path):
    save_model(text_model(), path)
    empty = {f"stack.blocks.{index}.nothing": torch.zeros(0) for index in range(2, 10_000)}
    forge_tensors(path, metadata=with_config(num_layers=10_000), tensors=empty)
    with pytest.raises(ValueError, match=r"blocks\.2\.\S+ is missing") as refused:
        load_model(path)
    assert len(str(refused.value)) < 3000


@pytest.mark.parametrize(
    "model", [text_model(d_ff=(16, 24)), vision_model(patch_size=8, image_size=8)], ids=["d_ff", "patch"]
)
def test_sizes_of_every_kind_are_admitted_if_they_are_true(path, model):
    save_model(model, path)
    assert_same(model, load_model(path))


def test_nothing_is_loaded_from_a_damaged_file(path, monkeypatch):
    save_model(text_model(), path)
    flip_inside(path, 0.9)
    monkeypatch.setattr(weights, "safe_open", None)
    with rejects("path", hint="checksum mismatch"):
        load_model(path)


def test_a_pickle_is_refused_and_not_read(path):
    torch.save(text_model().state_dict(), path)
    with rejects("path"):
        load_model(path)


def test_a_file_that_is_not_there_is_missed_by_name(path):
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        load_model(path)


def test_other_modules_are_refused(path):
    with pytest.raises(TypeError, match=r"^model must be"):
        save_model(nn.Linear(2, 2), path)
    assert not path.exists()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("change", [norm_a_projection, quantize])
def test_a_model_whose_tensors_have_other_names_is_not_saved(path, change):
    with rejects("model", hint="stack.blocks.0.attention.") as caught:
        save_model(change(text_model()), path)
    assert "Remove parametrizations, adapters and quantization" in caught.value.hint
    assert not path.exists()
