import pytest
from errors import rejects

from tidegate.gates import Gates
from tidegate.lab.compare.variants import (
    TRAINING_OPTIONS,
    model_options,
    parse_variant,
    parse_variants,
    training_options,
)
from tidegate.lab.training.records import Variant


@pytest.mark.parametrize("gate", ["none", "g1", "bma-query", "g1+bma", "output:input:head:silu", "value:query:r8:b1.5"])
def test_every_gate_that_can_be_spelled_is_a_variant_under_its_spelling(gate):
    assert parse_variant(gate) == Variant(name=gate, gate=str(Gates.parse(gate)))
    assert parse_variant(gate).gates == Gates.parse(gate)


@pytest.mark.parametrize(
    ("text", "name", "gate", "training"),
    [
        ("low=bma@lr=3e-3", "low", "bma", {"lr": 3e-3}),
        ("bma@lr=1e-5", "bma@lr=1e-5", "bma", {"lr": 1e-5}),
        ("a=none@lr=1@clip=0.5@gate-lr=2", "a", "none", {"lr": 1.0, "clip": 0.5, "gate_lr": 2.0}),
        (" spaced = g1 @ lr = 2 ", "spaced", "g1", {"lr": 2.0}),
        ("two words=none", "two words", "none", {}),
        *((f"x=none@{option}=1", "x", "none", {option: 1.0}) for option in TRAINING_OPTIONS),
    ],
)
def test_a_name_and_options_are_read(text, name, gate, training):
    variant = parse_variant(text)
    assert (variant.name, variant.gates, variant.overrides) == (name, Gates.parse(gate), training)
    assert (training_options(variant), model_options(variant)) == (training, {})


@pytest.mark.parametrize(
    ("option", "model", "recorded"),
    [
        ("init=fan-in", {"init": "fan-in"}, {"init": "fan-in"}),
        ("init=0.1", {"init": 0.1}, {"init": 0.1}),
        ("d_ff=240", {"d_ff": 240}, {"d_ff": 240}),
        ("qk-norm=yes", {"qk_norm": True}, {"qk_norm": "yes"}),
        ("qk_norm=no", {"qk_norm": False}, {"qk_norm": "no"}),
        ("params=g1", {}, {"params": "g1"}),
        ("first_seed=0", {}, {}),
    ],
)
def test_options_of_the_model_are_read(option, model, recorded):
    variant = parse_variant(f"none@{option}")
    assert (model_options(variant), training_options(variant)) == (model, {})
    assert variant.overrides == recorded


@pytest.mark.parametrize(
    ("text", "gate"),
    [
        ("g1@placebo=constant", "output:input:constant"),
        ("half=g1@placebo=constant", "output:input:constant"),
        ("bma+g1@placebo=shuffled", "value:query:shuffled+output:input:shuffled"),
        ("sink@placebo=constant", "output:partition:head:b0:constant"),
    ],
)
def test_a_placebo_is_the_gate_with_a_placebo(text, gate):
    variant = parse_variant(text)
    assert (variant.gates, variant.overrides) == (Gates.parse(gate), {})


def test_options_are_recorded_in_one_order():
    variant = parse_variant("again=none@init=torch@first_seed=100@lr=0.1")
    assert list(variant.overrides.items()) == [("lr", 0.1), ("first_seed", 100), ("init", "torch")]


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("=none", "Write a name"),
        ("none@rate=1", "'rate=1' is none of"),
        ("none@lr=fast", ""),
        ("none@first_seed=-1", ""),
        ("none@first_seed=inf", ""),
        ("none@init=large", ""),
        ("none@qk_norm=1", ""),
        ("none@lr=1@lr=2", "Leave one of them out"),
        ("none@params=g1@d_ff=3", "Leave d_ff or params"),
        ("none@placebo=constant", "Leave @placebo out"),
        ("output:input:shuffled@placebo=constant", "Leave @placebo out"),
    ],
)
def test_a_faulty_variant_is_an_error_with_a_remedy(text, hint):
    with rejects("variant", hint=hint):
        parse_variant(text)
    with rejects("variants", hint=hint):
        parse_variants(f"none,{text}")


@pytest.mark.parametrize("text", ["gma", "g1@placebo=random", "output:input:silu@placebo=constant"])
def test_a_gate_that_cannot_be_is_an_error(text):
    with pytest.raises(ValueError, match=r"gma|random|silu"):
        parse_variant(text)


def test_a_list_keeps_its_order_the_control_first():
    names = [variant.name for variant in parse_variants("none, g1,low=bma@lr=1e-3 ,bma-query,")]
    assert names == ["none", "g1", "low", "bma-query"]


@pytest.mark.parametrize("text", ["", "none", "none,", " , ", "none,none", "a=none,b=g1,a=bma", "none, none=bma"])
def test_a_list_has_two_variants_of_different_names(text):
    with rejects("variants"):
        parse_variants(text)
