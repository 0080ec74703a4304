import pytest

from tidegate.gates import Gates
from tidegate.lab.compare.variants import TRAINING_OPTIONS, Variant, parse_variants


@pytest.mark.parametrize("gate", ["none", "g1", "bma-query", "g1+bma", "output:input:head:silu", "value:query:r8:b1.5"])
def test_every_gate_that_can_be_spelled_is_a_variant_under_its_spelling(gate):
    assert Variant.parse(gate) == Variant(name=gate, gates=Gates.parse(gate))


@pytest.mark.parametrize(
    ("text", "name", "gate", "training"),
    [
        ("low=bma@lr=3e-3", "low", "bma", {"lr": 3e-3}),
        ("bma@lr=1e-5", "bma@lr=1e-5", "bma", {"lr": 1e-5}),
        ("a=none@lr=1@clip=0.5@gate-lr=2", "a", "none", {"lr": 1.0, "clip": 0.5, "gate_lr": 2.0}),
        (" spaced = g1 @ lr = 2 ", "spaced", "g1", {"lr": 2.0}),
        ("two words=none", "two words", "none", {}),
    ],
)
def test_a_name_and_options_are_read(text, name, gate, training):
    assert Variant.parse(text) == Variant(name=name, gates=Gates.parse(gate), training=training)


@pytest.mark.parametrize(
    ("text", "model", "recorded"),
    [
        ("none@init=fan-in", {"init": "fan-in"}, {"init": "fan-in"}),
        ("none@init=torch", {"init": "torch"}, {"init": "torch"}),
        ("none@init=0.1", {"init": 0.1}, {"init": 0.1}),
        ("none@d_ff=240", {"d_ff": 240}, {"d_ff": 240}),
        ("none@qk-norm=yes", {"qk_norm": True}, {"qk_norm": "yes"}),
        ("none@qk_norm=no", {"qk_norm": False}, {"qk_norm": "no"}),
    ],
)
def test_options_of_the_model_are_read(text, model, recorded):
    variant = Variant.parse(text)
    assert (variant.model, variant.training) == (model, {})
    assert variant.plan().overrides == recorded


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
    variant = Variant.parse(text)
    assert variant.gates == Gates.parse(gate)
    assert variant.options == {}


def test_a_variant_may_be_widened_to_the_size_of_another():
    variant = Variant.parse("wide=none@params=g1")
    assert (variant.params, variant.options) == ("g1", {"params": "g1"})


def test_seeds_may_begin_elsewhere():
    variant = Variant.parse("again=none@first_seed=100@lr=0.1")
    assert (variant.first_seed, variant.training) == (100, {"lr": 0.1})
    assert variant.plan().overrides == {"lr": 0.1, "first_seed": 100}


def test_the_plan_says_all_that_was_set_and_no_more():
    plan = Variant.parse("low=bma@lr=1e-3").plan()
    assert (plan.name, plan.gate, plan.overrides) == ("low", "bma", {"lr": 1e-3})
    assert Variant.parse("none").plan().overrides == {}


@pytest.mark.parametrize("option", TRAINING_OPTIONS)
def test_each_option_is_taken(option):
    plan = Variant.parse(f"none@{option}=1").plan()
    assert plan.overrides == {option: 1.0}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("=none", "has an empty name"),
        (" =none", "has an empty name"),
        ("gma", "gate must be a preset or site:reads, got 'gma'"),
        ("none@rate=1", "'rate=1' in 'none@rate=1' is no option of a variant"),
        ("none@lr", "'lr' in 'none@lr' is no option of a variant"),
        ("none@lr=fast", "lr of the variant 'none@lr=fast' must be a finite number; got 'fast'"),
        ("none@steps=3", "no option of a variant"),
        ("none@first_seed=-1", "first_seed must be a whole number of at least 0; got -1"),
        ("none@first_seed=1.5", "first_seed must be a whole number of at least 0; got 1.5"),
        ("none@first_seed=inf", "must be a finite number; got 'inf'"),
        ("none@first_seed=nan", "must be a finite number; got 'nan'"),
        ("none@init=large", "init of the variant 'none@init=large' must be a finite number; got 'large'"),
        ("none@qk_norm=1", "qk_norm of the variant 'none@qk_norm=1' must be yes or no; got '1'"),
        ("none@d_ff=2.5", "d_ff must be a whole number of at least 0; got 2.5"),
        ("none@placebo=constant", "has no gate, and so no placebo"),
        ("output:input:shuffled@placebo=constant", "names its placebo twice"),
        ("g1@placebo=random", "Gate.placebo must be a known placebo, got 'random'"),
        ("output:input:silu@placebo=constant", "It starts at 0 and lets nothing pass"),
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
