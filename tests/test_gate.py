import json
import math
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from errors import rejects
from hypothesis import given, settings
from hypothesis import strategies as st

from tidegate import PRESETS, Gate, Gates, HeadShape, InputError, legal_gates

READS_AT = {
    "output": ("input", "query", "value", "output", "partition", "nothing"),
    "value": ("input", "query", "value", "nothing"),
    "key": ("input", "query", "value", "nothing"),
    "query": ("input", "query", "value", "nothing"),
    "dense": ("input", "output", "nothing"),
}
COMBINATIONS = {
    (site, reads, grain)
    for site, sources in READS_AT.items()
    for reads in sources
    for grain in (("element",) if site == "dense" else ("head",) if reads == "partition" else ("element", "head"))
}
ACTIVATIONS = ("sigmoid", "silu", "softplus", "tanh1", "twosigmoid", "identity", "gelu", "tanh")
NUMERIC = {"r1": "rank", "w1": "width", "s0": "init_std"}
STARTS_OPEN = ("sigmoid", "softplus", "tanh1", "twosigmoid")
numbers = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def gates(draw):
    site, reads, grain = draw(st.sampled_from(sorted(COMBINATIONS)))
    bias = draw(st.none() | numbers)
    if reads == "partition":
        placebo = draw(st.sampled_from([None, "constant"]))
        return Gate(site=site, reads=reads, grain=grain, bias=bias, placebo=placebo)
    if reads == site and grain == "element" and draw(st.booleans()):
        return Gate(site=site, reads=reads, activation=draw(st.sampled_from(ACTIVATIONS)), op="replace")
    activation = draw(st.sampled_from(ACTIVATIONS))
    placebos = (None, "constant", *(("shuffled",) if reads != "nothing" else ()))
    options = {
        "site": site,
        "reads": reads,
        "grain": grain,
        "share": "head" if site == "dense" else draw(st.sampled_from(["head", "group", "layer"])),
        "activation": activation,
        "op": draw(st.sampled_from(["multiply", "add"])),
        "bias": bias,
        "placebo": draw(st.sampled_from(placebos if activation in STARTS_OPEN else [None])),
    }
    if reads == "nothing":
        return Gate(**options)
    return Gate(
        **options,
        rank=draw(st.none() | st.integers(1, 10**6)),
        width=draw(st.none() | st.integers(1, 10**6)),
        init_std=draw(st.just(0.02) | numbers.map(abs)),
    )


class TestSpelling:
    @given(gate=gates())
    @settings(max_examples=200)
    def test_a_spelling_parses_back(self, gate):
        assert Gate.parse(str(gate)) == gate
        assert Gate.parse(gate.spelling) == gate
        assert Gate.parse(f"  {gate.spelling}\n") == gate

    @given(gate=gates(), seed=st.randoms(use_true_random=False))
    def test_parts_after_reads_come_in_any_order(self, gate, seed):
        site, reads, *parts = gate.spelling.split(":")
        seed.shuffle(parts)
        assert Gate.parse(":".join([site, reads, *parts])) == gate

    @pytest.mark.parametrize(
        ("spelling", "options"),
        {
            "output:input": {},
            "output:input:head": {"grain": "head"},
            **{f"output:input:{activation}": {"activation": activation} for activation in ACTIVATIONS[1:]},
            "output:input:constant": {"placebo": "constant"},
            "output:input:shuffled": {"placebo": "shuffled"},
            "output:output:gelu:replace": {"reads": "output", "activation": "gelu", "op": "replace"},
            "output:nothing": {"reads": "nothing"},
            "output:nothing:b2": {"reads": "nothing", "bias": 2.0},
            "output:input:shared-group": {"share": "group"},
            "output:input:shared-layer": {"share": "layer"},
            "output:input:add": {"op": "add"},
            "output:input:r8": {"rank": 8},
            "output:input:b1.5": {"bias": 1.5},
            "output:input:b1e20": {"bias": 1e20},
            "output:input:s1e-07": {"init_std": 1e-7},
            "value:value:head:silu:shared-group:add:r8:w12:b1.5:s0.1": {
                "site": "value",
                "reads": "value",
                "grain": "head",
                "activation": "silu",
                "share": "group",
                "op": "add",
                "rank": 8,
                "width": 12,
                "bias": 1.5,
                "init_std": 0.1,
            },
        }.items(),
    )
    def test_each_field_has_its_part(self, spelling, options):
        gate = Gate(**options)
        assert gate.spelling == spelling
        assert Gate.parse(spelling) == gate

    @pytest.mark.parametrize("name", PRESETS)
    def test_a_preset_is_spelled_by_its_name(self, name):
        assert str(PRESETS[name]) == name
        assert Gate.parse(name) is PRESETS[name]
        assert Gate.parse(f" {name} ") is PRESETS[name]
        assert Gate.parse(PRESETS[name].spelling) == PRESETS[name]

    def test_a_preset_with_another_option_has_no_name(self):
        assert str(replace(PRESETS["bma"], bias=0.0)) == "value:query:b0"


PRESET_TABLE = {
    "bma": ("value", "query", "element"),
    "bma-query": ("output", "query", "element"),
    "g1": ("output", "input", "element"),
    "g1-head": ("output", "input", "head"),
    "g2": ("value", "input", "element"),
    "g3": ("key", "input", "element"),
    "g4": ("query", "input", "element"),
    "g5": ("dense", "input", "element"),
    "vga": ("value", "value", "element"),
    "sink": ("output", "partition", "head"),
    "off-by-one": ("output", "partition", "head"),
}


def test_presets_mean_what_the_table_says():
    assert {name: (gate.site, gate.reads, gate.grain) for name, gate in PRESETS.items()} == PRESET_TABLE
    for name, gate in PRESETS.items():
        rest = (gate.share, gate.activation, gate.op, gate.rank, gate.width, gate.init_std, gate.bias)
        assert rest == ("head", "sigmoid", "multiply", None, None, 0.02, 0.0 if name == "sink" else None)


def test_legal_gates_are_all_that_the_vocabulary_allows():
    found = [(gate.site, gate.reads, gate.grain) for gate in legal_gates()]
    assert len(found) == 38
    assert set(found) == COMBINATIONS
    assert all(
        replace(gate, site="output", reads="input", grain="element", bias=None) == Gate() for gate in legal_gates()
    )


NO_HEADS = "there are no heads"
REJECTED = {
    **{f"{site}:output": ("site", f"Use {site}:input or output:output.") for site in ("query", "key", "value")},
    **{f"dense:{reads}": ("reads", NO_HEADS) for reads in ("query", "value", "partition")},
    "dense:input:head": ("grain", NO_HEADS),
    "dense:input:shared-group": ("share", NO_HEADS),
    "query:partition:head": ("site", "'sink'"),
    "output:partition": ("grain", "'off-by-one'"),
    "output:partition:head:shared-group": ("share", "one partition function"),
    "output:partition:head:add": ("op", "is a sink"),
    **{f"output:partition:head:{word}": ("activation", "is a sink") for word in ACTIVATIONS[1:]},
    **{f"output:partition:head:{part}": (name, "") for part, name in NUMERIC.items()},
    **{f"output:nothing:{part}": (name, "") for part, name in NUMERIC.items()},
    **{f"output:output:gelu:replace:{part}": (name, "") for part, name in NUMERIC.items()},
    "output:input:gelu:replace": ("reads", "Use output:output"),
    "output:output:gelu:replace:b0": ("bias", "no parameters"),
    "output:output:gelu:replace:constant": ("placebo", "'none'"),
    "output:nothing:shuffled": ("placebo", ""),
    "output:partition:head:shuffled": ("placebo", ""),
    "output:input:silu:constant": ("bias", "the placebo 'shuffled'"),
    "output:nothing:tanh:constant": ("bias", "the placebo 'shuffled'"),
}


class TestRejection:
    @pytest.mark.parametrize("site", READS_AT)
    @pytest.mark.parametrize("reads", ["input", "query", "value", "output", "partition", "nothing"])
    @pytest.mark.parametrize("grain", ["element", "head"])
    def test_a_combination_is_rejected_exactly_if_it_is_not_in_the_table(self, site, reads, grain):
        if (site, reads, grain) in COMBINATIONS:
            assert Gate(site=site, reads=reads, grain=grain).site == site
        else:
            with pytest.raises(
                InputError, check=lambda error: error.field in ("Gate.site", "Gate.reads", "Gate.grain")
            ):
                Gate(site=site, reads=reads, grain=grain)

    @pytest.mark.parametrize(("spelling", "field", "hint"), [(key, *value) for key, value in REJECTED.items()])
    def test_a_combination_without_meaning_names_the_field_and_a_remedy(self, spelling, field, hint):
        with rejects(f"Gate.{field}", hint=hint):
            Gate.parse(spelling)

    @pytest.mark.parametrize(
        ("options", "suggestion"),
        [
            ({"site": "outptu"}, "Did you mean output?"),
            ({"reads": ["input"]}, "Did you mean input?"),
            ({"activation": "gauss"}, "Known: sigmoid"),
            ({"site": None}, "Known: output"),
            *(({name: "times"}, "") for name in ("grain", "share", "op", "placebo")),
        ],
    )
    def test_an_unknown_choice_suggests_the_nearest(self, options, suggestion):
        ((name, _),) = options.items()
        with rejects(f"Gate.{name}", hint=suggestion):
            Gate(**options)

    @pytest.mark.parametrize("name", ["rank", "width"])
    @pytest.mark.parametrize("value", [0, -1, 1.0, "3", True, False])
    def test_a_rank_or_width_is_a_positive_integer(self, name, value):
        with rejects(f"Gate.{name}"):
            Gate(**{name: value})
        assert getattr(Gate(**{name: 1}), name) == 1

    @pytest.mark.parametrize("name", ["init_std", "bias"])
    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "1", True])
    def test_a_deviation_or_bias_is_a_finite_number(self, name, value):
        with rejects(f"Gate.{name}"):
            Gate(**{name: value})

    @pytest.mark.parametrize("value", [None, -0.5])
    def test_a_deviation_is_never_none_nor_negative(self, value):
        with rejects("Gate.init_std"):
            Gate(init_std=value)

    def test_integers_become_floats(self):
        gate = Gate(init_std=1, bias=2)
        assert (type(gate.init_std), type(gate.bias)) == (float, float)
        assert gate == Gate(init_std=1.0, bias=2.0)
        assert Gate(init_std=0).init_std == 0


class TestParsing:
    @pytest.mark.parametrize(
        ("text", "field", "hint"),
        [
            ("bna", "gate", "Did you mean bma?"),
            ("BMA", "gate", "Did you mean bma"),
            ("zzz", "gate", "Known: none, bma"),
            ("", "gate", "Known: none, "),
            *((text, "gate", "Use Gates.parse") for text in ("none", "g1+g2", "g1:b1e+2")),
            ("g1:head", "gate", "Write output:input in place of g1."),
            ("valu:query", "Gate.site", "Did you mean value?"),
            ("output:input:sillu", "gate", "Did you mean silu?"),
            *((f"output:input:{part}", "gate", "") for part in ("r8:r9", "silu:tanh1", "w3:w3")),
            ("output:input:w0", "Gate.width", ""),
            ("output:input:bnan", "Gate.bias", ""),
            ("output:input:s-1", "Gate.init_std", ""),
            *((f"output:input:{part}", "gate", "Numbers are r8 (rank)") for part in ("r8.5", "rx", "b", "", "q4")),
        ],
    )
    def test_a_spelling_that_cannot_be_read_names_the_field_and_a_remedy(self, text, field, hint):
        with rejects(field, hint=hint):
            Gate.parse(text)

    @pytest.mark.parametrize(("text", "joined"), [("g1,g2", "g1+g2"), ("bma , output:input:r8", "bma+output:input:r8")])
    def test_gates_joined_by_a_comma_are_told_to_use_a_plus(self, text, joined):
        for parse in (Gate.parse, Gates.parse):
            with rejects("gate", hint=f"Write '{joined}'."):
                parse(text)
        assert len(Gates.parse(joined)) == 2

    @pytest.mark.parametrize(
        "spell",
        [str, "{}:input".format, "output:input:{}".format, "g1:{}".format, "output:input:r{}".format, "{0},{0}".format],
    )
    def test_an_error_about_a_spelling_of_any_length_is_short(self, spell):
        with pytest.raises(InputError, check=lambda error: error.field in ("gate", "Gate.site")) as caught:
            Gates.parse(spell("1" * 10**6))
        assert len(str(caught.value)) < 1000
        with pytest.raises(InputError) as caught:
            Gate.from_json(f'{{"{spell("1" * 10**6)}": 1}}')
        assert len(str(caught.value)) < 1000

    @pytest.mark.parametrize("value", [None, 3, Gate(), ["g1"]], ids=str)
    def test_only_strings_are_parsed(self, value):
        with pytest.raises(TypeError, match=r"^gate must be"):
            Gate.parse(value)


class TestJson:
    @given(gate=gates())
    def test_json_reads_back(self, gate):
        assert Gate.from_json(gate.to_json()) == gate
        assert set(json.loads(gate.to_json())) == {field.name for field in fields(Gate)}

    def test_missing_fields_take_their_defaults(self):
        assert Gate.from_json('{"site": "value", "reads": "query"}') == PRESETS["bma"]
        assert Gate.from_json("{}") == Gate()

    @pytest.mark.parametrize(
        ("text", "field"),
        {'"bma"': "value", "[]": "value", '{"sight": "value"}': "sight", '{"site": "sea"}': "site"}.items(),
    )
    def test_json_that_is_not_a_gate_is_rejected_by_the_field(self, text, field):
        with rejects(field):
            Gate.from_json(text)


class TestParameters:
    @given(
        gate=gates(),
        d=st.integers(1, 40),
        h=st.integers(1, 10),
        groups=st.integers(1, 4),
        size=st.integers(1, 4),
        share_of_width=st.floats(0, 1),
        rank=st.none() | st.integers(1, 5),
    )
    @settings(max_examples=200)
    def test_counts_and_shapes_have_a_closed_form(self, gate, d, h, groups, size, share_of_width, rank):
        H = groups * size
        source, dense = gate.site in ("key", "value"), gate.site == "dense"
        read = {
            "input": d,
            "query": size * h if source else h,
            "value": h,
            "output": H * h if dense else h,
            "partition": 1,
            "nothing": 0,
        }[gate.reads]
        width = None if gate.width is None else max(1, int(share_of_width * read))
        has_matrix = gate.reads not in ("partition", "nothing") and gate.op != "replace"
        rank = rank if has_matrix else None
        has_matrix = has_matrix and gate.placebo != "constant"
        gate = replace(gate, width=width, rank=rank)
        read = width or read
        gated = 1 if gate.grain == "head" or gate.placebo == "constant" else d if dense else h
        matrices = {"head": 1 if dense else groups if source else H, "group": groups, "layer": 1}[gate.share]

        matrix = 0 if not has_matrix else read * gated if rank is None else rank * (read + gated)
        has_bias = gate.bias is not None and gate.placebo != "constant"
        each = matrix + (gated if has_bias else 0)
        sizes = {"d_model": d, "num_heads": H, "num_kv_heads": groups, "head_dim": h}
        assert gate.num_parameters(**sizes) == matrices * each

        shapes = gate.parameter_shapes(**sizes)
        expected = (
            {"weight": (matrices, read, gated)}
            if rank is None
            else {"weight_down": (matrices, read, rank), "weight_up": (matrices, rank, gated)}
        )
        expected = expected if has_matrix else {}
        assert shapes == expected | ({"bias": (matrices, gated)} if has_bias else {})
        assert list(shapes) == list(expected) + (["bias"] if has_bias else [])

        shape = HeadShape(**sizes)
        assert gate.num_matrices(shape) == matrices
        assert gate.read_width(shape) == read
        assert gate.gated_width(shape) == gated
        assert gate.num_heads_at_site(shape) == (1 if dense else groups if source else H)

    @pytest.mark.parametrize(
        ("text", "widest"),
        {
            "g1": 24,
            "bma": 12,
            "bma-query": 6,
            "output:value": 6,
            "vga": 6,
            "output:output": 6,
            "dense:output": 24,
        }.items(),
    )
    def test_a_width_beyond_what_is_read_is_refused(self, text, widest):
        sizes = {"d_model": 24, "num_heads": 4, "num_kv_heads": 2}
        gate = Gate.parse(text)
        assert replace(gate, width=widest).parameter_shapes(**sizes) == gate.parameter_shapes(**sizes)
        with rejects("Gate.width"):
            replace(gate, width=widest + 1).parameter_shapes(**sizes)


NEEDS_SELF_ATTENTION = {("value", "query"), ("key", "query"), ("output", "value"), ("query", "value")}


@pytest.mark.parametrize("gate", list(legal_gates()), ids=str)
def test_a_gate_is_refused_for_cross_attention_exactly_if_it_needs_self_attention(gate):
    if (gate.site, gate.reads) not in NEEDS_SELF_ATTENTION:
        assert gate.require_cross_attention() is None
        return
    with rejects("gate", hint="Use a gate such as 'bma-query' or 'g1'."):
        gate.require_cross_attention()


@given(gate=gates())
def test_gates_are_frozen_and_hashable_values(gate):
    with pytest.raises(FrozenInstanceError):
        gate.site = "value"
    twin = replace(gate)
    assert twin is not gate
    assert (twin, hash(twin)) == (gate, hash(gate))
    assert not hasattr(gate, "__dict__")


def test_fields_are_keywords():
    with pytest.raises(TypeError, match="positional"):
        Gate("value", "query")


class TestPlacebos:
    def test_only_shuffled_gates_need_other_sequences(self):
        for gate in (*PRESETS.values(), Gate(placebo="constant")):
            assert gate.require_other_sequences(1, cached=True) is None
        shuffled = Gate(placebo="shuffled")
        assert shuffled.require_other_sequences(2) is None
        with rejects("x"):
            shuffled.require_other_sequences(1)
        with rejects("cache", hint="Read the whole batch"):
            shuffled.require_other_sequences(2, cached=True)

    @pytest.mark.parametrize(
        ("spelling", "undone"),
        {
            "key:input:head": True,
            "query:nothing:head": True,
            "key:input:constant": True,
            "key:input": False,
            "query:input:head:silu": False,
            "key:input:head:add": False,
            "value:input:head": False,
        }.items(),
    )
    def test_a_norm_undoes_one_positive_factor_of_whole_queries_or_keys(self, spelling, undone):
        assert Gate.parse(spelling).is_undone_by_norm == undone
