import pytest

from tidegate.cli.compare import DEFAULT_VARIANTS
from tidegate.lab.compare.variants import parse_variants, placebos_of, with_constants

HALF = "half=g1@placebo=constant"
SHUFFLED = "noise=g1@placebo=shuffled"
ONE = "one=output:input:twosigmoid"
ONE_SHUFFLED = "one-noise=output:input:twosigmoid@placebo=shuffled"


def placebos(text, name):
    plans = parse_variants(text)
    variant = next(plan for plan in plans if plan.name == name)
    return placebos_of(variant, plans, control=plans[0].name)


@pytest.mark.parametrize(
    ("variants", "name", "expected"),
    [
        (f"none,g1,{HALF}", "g1", ("half",)),
        (f"none,g1,{SHUFFLED},{HALF}", "g1", ("noise", "half")),
        # One constant scales the branch alike, wherever it stands.
        (f"none,bma,{HALF}", "bma", ("half",)),
        # A gate of keys does not scale the branch.
        (f"none,g3,{HALF}", "g3", ()),
        (f"none,{ONE},{HALF}", "one", ("none",)),
        (f"none,{ONE},{ONE_SHUFFLED}", "one", ("one-noise",)),
        (f"none,{ONE},{SHUFFLED}", "one", ("none",)),
        # The control stands for a constant 1 only if it differs in nothing else.
        (f"g1,{ONE}", "one", ()),
        (f"none,{ONE}@lr=1e-3", "one", ()),
        (f"none=none@lr=1e-3,{ONE}@lr=1e-3", "one", ("none",)),
        ("none,g1,free=output:nothing", "g1", ("free",)),
        ("none,sink,keys=sink@placebo=constant", "sink", ("keys",)),
        ("none,off-by-one,keys=sink@placebo=constant", "off-by-one", ()),
        (f"none,slow=g1@lr=1e-3,{HALF}", "slow", ()),
        ("none,slow=g1@lr=1e-3,half=g1@placebo=constant@lr=1e-3", "slow", ("half",)),
        ("none,g1+bma,quarter=g1+bma@placebo=constant", "g1+bma", ("quarter",)),
        (f"none,g1+bma,{HALF}", "g1+bma", ()),
        (f"none,g1,{HALF}", "none", ()),
        ("none,gelu=output:output:gelu:replace", "gelu", ()),
        (DEFAULT_VARIANTS, "g1-from-1", ("g1-shuffled",)),
    ],
)
def test_a_placebo_has_all_of_the_gate_but_its_mechanism(variants, name, expected):
    assert placebos(variants, name) == expected


@pytest.mark.parametrize(
    ("variants", "added"),
    [
        ("none,g1", {"constant 0.5": "output:input:constant"}),
        (f"none,g1,{HALF}", {}),
        (f"none,{ONE}", {}),
        (
            "none,g1,slow=bma@lr=1e-3,slower=g1@lr=1e-3",
            {"constant 0.5": "output:input:constant", "constant 0.5@lr=0.001": "value:query:constant"},
        ),
        ("none,g3", {}),
        ("none,sink", {}),
        ("none,output:input:silu", {}),
        ("none,output:input:b1:silu", {"constant 0.731059": "output:input:silu:b1:constant"}),
        ("none,g1+bma", {"constant 0.25": "value:query:constant+output:input:constant"}),
        ("none,gelu=output:output:gelu:replace", {}),
    ],
)
def test_the_constant_is_added_where_a_gate_does_not_start_at_1(variants, added):
    asked = parse_variants(variants)
    found = with_constants(asked)
    assert found[: len(asked)] == asked
    assert {variant.name: str(variant.gates) for variant in found[len(asked) :]} == added
