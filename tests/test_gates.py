import copy
import itertools
import pickle

import pytest
from errors import rejects
from hypothesis import given
from hypothesis import strategies as st

from tidegate import PRESETS, Gate, Gates, legal_gates
from tidegate.gate import GATE_PATHS

ALL = tuple(legal_gates())
several = st.lists(st.sampled_from(ALL), max_size=5, unique_by=lambda gate: gate.path)


@given(gates=several)
def test_a_spelling_of_several_gates_parses_back(gates):
    layer = Gates(gates)
    assert Gates.parse(str(layer)) == layer
    assert eval(repr(layer), {"Gates": Gates}) == layer
    assert Gates.from_json(layer.to_json()) == layer


@given(gates=several, seed=st.randoms(use_true_random=False))
def test_order_of_writing_does_not_matter(gates, seed):
    shuffled = list(gates)
    seed.shuffle(shuffled)
    assert Gates(shuffled) == Gates(gates)
    assert hash(Gates(shuffled)) == hash(Gates(gates))
    assert str(Gates.parse("+".join(map(str, shuffled)) or "none")) == str(Gates(gates))


def test_the_canonical_order_is_that_in_which_a_layer_meets_them():
    assert GATE_PATHS == ("query", "key", "value", "partition", "output", "dense")
    assert str(Gates.parse("g5+g1+sink+g2+g3+g4")) == "g4+g3+g2+sink+g1+g5"


@pytest.mark.parametrize("nothing", ["none", " none ", None, (), [], Gates()])
def test_no_gate_has_one_spelling(nothing):
    gates = Gates.parse(nothing)
    assert gates == Gates() == ()
    assert isinstance(gates, Gates)
    assert str(gates) == "none"
    assert repr(gates) == "Gates.parse('none')"
    assert gates.to_json() == "[]"


@pytest.mark.parametrize(
    "several",
    [
        "g1+bma",
        " bma + g1 ",
        ["g1", "bma"],
        (Gate(), PRESETS["bma"]),
        [Gate(), "bma"],
        (gate for gate in ("bma", "g1")),
        Gates.parse("g1+bma"),
    ],
)
def test_a_string_a_gate_or_several_say_the_same(several):
    gates = Gates.parse(several)
    assert isinstance(gates, Gates)
    assert gates == (PRESETS["bma"], PRESETS["g1"])


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(PRESETS.values(), 2)), ids=str)
def test_two_gates_share_a_layer_exactly_if_they_have_different_sites_or_one_is_a_sink(first, second):
    num_sinks = (first.reads == "partition") + (second.reads == "partition")
    if first.site != second.site or num_sinks == 1:
        assert set(Gates((first, second))) == {first, second}
    else:
        with rejects("gate", hint="Choose one"):
            Gates((first, second))


def test_none_is_no_gate_among_others():
    with rejects("gate", hint="Use Gates.parse"):
        Gates.parse("g1+none")


@pytest.mark.parametrize("text", ["", "g1+", "+", "g1++g2"])
def test_an_empty_part_is_refused(text):
    with rejects("gate", hint="Known: none"):
        Gates.parse(text)


@given(gates=several)
def test_at_finds_the_gate_of_a_site_and_the_sink_apart(gates):
    layer = Gates(gates)
    by_path = {"partition" if gate.reads == "partition" else gate.site: gate for gate in gates}
    for path in GATE_PATHS:
        assert layer.at(path) == by_path.get(path)


@given(gates=several)
def test_gates_are_refused_for_cross_attention_if_one_of_them_is(gates):
    refused = [gate for gate in Gates(gates) if gate.needs_self_attention]
    if not refused:
        assert Gates(gates).require_cross_attention() is None
        return
    with rejects("gate") as caught:
        Gates(gates).require_cross_attention()
    assert caught.value.got == str(refused[0])


def test_parameters_of_gates_add_up():
    sizes = {"d_model": 512, "num_heads": 8}
    assert Gates.parse("bma+g1").num_parameters(**sizes) == 32_768 + 262_144
    assert Gates().num_parameters(**sizes) == 0
    grouped = {"d_model": 96, "num_heads": 8, "num_kv_heads": 2, "head_dim": 16}
    assert Gates.parse("bma+g1-head").num_parameters(**grouped) == 8 * 16 * 16 + 96 * 8


@pytest.mark.parametrize("text", ['{"site": "value"}', '"g1"', "null", "3"])
def test_gates_in_json_are_a_list_of_objects(text):
    with rejects("value"):
        Gates.from_json(text)
    with rejects("[0]"):
        Gates.from_json('["g1"]')


def test_gates_survive_copies_and_pickles():
    gates = Gates.parse("g1+g2")
    for twin in (copy.copy(gates), copy.deepcopy(gates), pickle.loads(pickle.dumps(gates))):
        assert twin == gates
        assert isinstance(twin, Gates)
