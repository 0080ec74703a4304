import json
from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest
from errors import rejects

from tidegate.config import (
    AttentionConfig,
    Rotary,
    StackConfig,
    TransformerConfig,
    VisionConfig,
)

UNUSUAL = [
    TransformerConfig(),
    TransformerConfig(gate="none", positions="learned", tie_embeddings=False, norm="layer", feedforward="gelu"),
    TransformerConfig(gate="g1+value:query:r3:b1.5", rotary=Rotary(base=500.0, fraction=0.5), window=7, d_ff=100),
    TransformerConfig(rotary=Rotary.yarn(32, base=500.0, factor=4.0, original_length=64)),
    TransformerConfig(num_kv_heads=2, head_dim=6, metric="learned", temperature=0.3, qk_norm=True, bias=True),
    VisionConfig(),
    VisionConfig(gate="vga", pooling="mean", image_size=15, patch_size=5, channels=1, dropout=0.25),
]


@pytest.mark.parametrize("config", UNUSUAL, ids=lambda config: config.to_json())
def test_json_and_back_is_the_same_configuration(config):
    again = type(config).from_json(config.to_json())
    assert again == config
    assert hash(again) == hash(config)


def test_json_holds_a_ramp_only_if_there_is_one():
    assert "ramp" not in TransformerConfig().to_json()
    assert '"ramp": [1, 7.5]' in TransformerConfig(rotary=Rotary(scale=2.0, ramp=(1, 7.5))).to_json()


@pytest.mark.parametrize("ramp", [(1,), (2, 2), (3, 1), (0, float("inf")), (float("nan"), 1)])
def test_a_ramp_that_does_not_rise_is_refused(ramp):
    with rejects("Rotary.ramp"):
        Rotary(ramp=ramp)


def test_json_holds_the_gates_as_they_are_spelled():
    assert json.loads(TransformerConfig(gate="g1+bma").to_json())["gate"] == "bma+g1"


@pytest.mark.parametrize("d_model", [1, 3, 24, 63, 100, 128])
def test_the_derived_width_holds_about_as_many_numbers_for_either_feedforward(d_model):
    gelu = TransformerConfig(d_model=d_model, head_dim=4, feedforward="gelu").feedforward_width
    swiglu = TransformerConfig(d_model=d_model, head_dim=4, feedforward="swiglu").feedforward_width
    assert gelu == 4 * d_model
    assert swiglu % 8 == 0
    assert 0 <= 3 * swiglu - 2 * gelu < 24


def test_a_derived_width_follows_the_model_and_a_given_one_stays():
    assert replace(TransformerConfig(feedforward="gelu"), d_model=64).feedforward_width == 256
    assert replace(TransformerConfig(d_ff=99), d_model=64).feedforward_width == 99


def test_a_configuration_is_frozen_and_its_base_cannot_be_made():
    with pytest.raises(FrozenInstanceError):
        TransformerConfig().d_model = 3
    with pytest.raises(TypeError, match="abstract"):
        StackConfig()


REJECTED = [
    (TransformerConfig, {"gate": "g9"}, "gate"),
    (TransformerConfig, {"gate": "output:query:w99"}, "Gate.width"),
    (TransformerConfig, {"d_model": 0}, "d_model"),
    (TransformerConfig, {"d_model": 130}, "d_model"),
    (TransformerConfig, {"num_heads": True}, "num_heads"),
    (TransformerConfig, {"num_kv_heads": 3}, "num_kv_heads"),
    (TransformerConfig, {"d_ff": 0}, "d_ff"),
    (TransformerConfig, {"feedforward": "relu"}, "feedforward"),
    (TransformerConfig, {"positions": "sine"}, "positions"),
    (TransformerConfig, {"dropout": 1.0}, "dropout"),
    (TransformerConfig, {"attention_dropout": -0.1}, "attention_dropout"),
    (TransformerConfig, {"temperature": 0.0}, "temperature"),
    (TransformerConfig, {"window": 0}, "window"),
    (TransformerConfig, {"max_length": None}, "max_length"),
    (TransformerConfig, {"head_dim": 5}, "Rotary.fraction"),
    (TransformerConfig, {"positions": "learned", "rotary": Rotary(base=5.0)}, "rotary"),
    (AttentionConfig, {"dropout": float("nan")}, "dropout"),
    (AttentionConfig, {"temperature": float("nan")}, "temperature"),
    (AttentionConfig, {"rope": Rotary(fraction=0.3)}, "Rotary.fraction"),
    (VisionConfig, {"patch_size": 5}, "patch_size"),
    (VisionConfig, {"pooling": "max"}, "pooling"),
]


@pytest.mark.parametrize(("config", "options", "field"), REJECTED, ids=[str(row[1]) for row in REJECTED])
def test_an_option_out_of_range_is_rejected_by_name(config, options, field):
    with rejects(field):
        config(**{"d_model": 128, "num_heads": 4, **options})


BOOLEANS = [
    (kind, option.name) for kind in (AttentionConfig, TransformerConfig, VisionConfig) for option in fields(kind)
    if option.type == "bool"
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), BOOLEANS, ids=lambda part: getattr(part, "__name__", part))
@pytest.mark.parametrize("value", ["no", "", 0, 1, None, np.True_], ids=repr)
def test_a_boolean_is_true_or_false_and_nothing_else(kind, name, value):
    sizes = {"d_model": 8, "num_heads": 2}
    with rejects(name):
        kind(**sizes, **{name: value})
    if kind is not AttentionConfig and not isinstance(value, np.bool_):
        with rejects(name):
            kind.from_json(json.dumps({**sizes, name: value}))
    assert getattr(kind(**sizes, **{name: True}), name) is True


@pytest.mark.parametrize("value", ["no", 1, np.True_], ids=repr)
def test_a_rotary_embedding_is_not_switched_on_by_what_is_no_boolean(value):
    with pytest.raises(TypeError, match=r"^rope must be"):
        AttentionConfig(d_model=8, num_heads=2, rope=value)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"widht": 3, "d_model": 8}', "widht"),
        ('{"rotary": {"bass": 3}}', "rotary.bass"),
        ('{"rotary": 3}', "rotary"),
        ('{"d_model": "128"}', "d_model"),
        ('{"gate": "g9"}', "gate"),
        ('{"gate": 3}', "value"),
        ("[]", "value"),
    ],
)
def test_json_that_is_not_a_configuration_is_rejected_by_name(text, field):
    with rejects(field):
        TransformerConfig.from_json(text)


def test_each_block_may_have_a_feed_forward_width_of_its_own():
    config = TransformerConfig(num_layers=3, d_ff=(8, 9, 10))
    assert [config.block(index).feedforward_width for index in range(3)] == [8, 9, 10]
    assert TransformerConfig.from_json(config.to_json()) == config
    with rejects("d_ff", hint="config.block(index)"):
        _ = config.feedforward_width


@pytest.mark.parametrize("widths", [(8, 9), (8, 0, 9), (8, 9.0, 10)])
def test_widths_that_do_not_fit_the_blocks_are_refused(widths):
    with rejects("d_ff"):
        TransformerConfig(num_layers=3, d_ff=widths)


def test_the_layers_of_a_model_have_its_options():
    shared = {"gate": "g1", "d_model": 12, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "qk_norm": True}
    shared |= {"metric": "learned", "temperature": 0.5, "bias": True, "recompute_gate": True}
    decoder = TransformerConfig(**shared, attention_dropout=0.25, dropout=0.5, window=3, rotary=Rotary(base=9.0))
    assert decoder.attention == AttentionConfig(**shared, dropout=0.25, window=3, rope=Rotary(base=9.0), causal=True)
    vision = VisionConfig(**shared, attention_dropout=0.25)
    assert vision.attention == AttentionConfig(**shared, dropout=0.25, causal=False)
    assert (decoder.causal, vision.causal) == (True, False)


def test_a_layer_and_the_layers_of_a_model_have_the_same_defaults():
    layer = AttentionConfig(d_model=128, num_heads=4)
    assert TransformerConfig(positions="none").attention == layer
    assert VisionConfig(d_model=128).attention == replace(layer, causal=False)
