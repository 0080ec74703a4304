import pytest

from tidegate.gates import Gates
from tidegate.lab.compare.request import OVERRIDES, Variant, parse_variants


@pytest.mark.parametrize("gate", ["none", "g1", "bma-query", "g1+bma", "output:input:head:silu", "value:query:r8:b1.5"])
def test_every_gate_that_can_be_spelled_is_a_variant_under_its_spelling(gate):
    assert Variant.parse(gate) == Variant(name=gate, gates=Gates.parse(gate))


@pytest.mark.parametrize(
    ("text", "name", "gate", "overrides"),
    [
        ("low=bma@lr=3e-3", "low", "bma", {"lr": 3e-3}),
        ("bma@lr=1e-5", "bma@lr=1e-5", "bma", {"lr": 1e-5}),
        ("a=none@lr=1@clip=0.5@gate-lr=2", "a", "none", {"lr": 1.0, "clip": 0.5, "gate_lr": 2.0}),
        (" spaced = g1 @ lr = 2 ", "spaced", "g1", {"lr": 2.0}),
        ("two words=none", "two words", "none", {}),
    ],
)
def test_a_name_and_options_are_read(text, name, gate, overrides):
    assert Variant.parse(text) == Variant(name=name, gates=Gates.parse(gate), overrides=overrides)


def test_seeds_may_begin_elsewhere():
    variant = Variant.parse("again=none@first_seed=100@lr=0.1")
    assert (variant.first_seed, variant.overrides) == (100, {"lr": 0.1})
    assert variant.plan().overrides == {"lr": 0.1, "first_seed": 100}


def test_the_plan_says_all_that_was_set_and_no_more():
    plan = Variant.parse("low=bma@lr=1e-3").plan()
    assert (plan.name, plan.gate, plan.overrides) == ("low", "bma", {"lr": 1e-3})
    assert Variant.parse("none").plan().overrides == {}


@pytest.mark.parametrize("option", OVERRIDES)
def test_each_option_is_taken(option):
    plan = Variant.parse(f"none@{option}=1").plan()
    assert plan.overrides == {option: 1.0}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("=none", "has an empty name"),
        (" =none", "has an empty name"),
        ("gma", "Unknown gate 'gma'"),
        ("none@rate=1", "'rate=1' in 'none@rate=1' is no option of a variant"),
        ("none@lr", "'lr' in 'none@lr' is no option of a variant"),
        ("none@lr=fast", "lr of the variant 'none@lr=fast' must be a finite number; got 'fast'"),
        ("none@steps=3", "no option of a variant"),
        ("none@first_seed=-1", "first_seed must be a whole number of at least 0; got -1"),
        ("none@first_seed=1.5", "first_seed must be a whole number of at least 0; got 1.5"),
        ("none@first_seed=inf", "must be a finite number; got 'inf'"),
        ("none@first_seed=nan", "must be a finite number; got 'nan'"),
    ],
)
def test_what_is_wrong_with_a_variant_is_said(text, complaint):
    with pytest.raises(ValueError, match=complaint):
        Variant.parse(text)


def test_a_list_keeps_its_order_the_control_first():
    names = [variant.name for variant in parse_variants("none, g1,low=bma@lr=1e-3 ,bma-query,")]
    assert names == ["none", "g1", "low", "bma-query"]


@pytest.mark.parametrize("text", ["", "none", "none,", " , "])
def test_fewer_than_two_are_refused(text):
    with pytest.raises(ValueError, match="variants must be at least two, the control first"):
        parse_variants(text)


@pytest.mark.parametrize("text", ["none,none", "a=none,b=g1,a=bma", "none, none=bma"])
def test_two_of_one_name_are_refused(text):
    with pytest.raises(ValueError, match=r"Two variants are called (none|a)\. Name them apart"):
        parse_variants(text)
