import pytest

from tidegate.lab.judging import compare_to_control, effect_of, judge_placebo, t_interval

NONE = [1.62, 1.60, 1.65, 1.61, 1.63]
GOOD = [1.60, 1.58, 1.62, 1.60, 1.61]
BAD = [1.66, 1.63, 1.69, 1.64, 1.67]


def judged(own, placebo):
    """A variant's result, and its comparison with a placebo."""
    comparison = compare_to_control({"none": NONE, "gate": own, "placebo": placebo}, control="none")
    return comparison["gate"], (judge_placebo(own, placebo, name="placebo"),)


def test_the_interval_is_that_of_the_pairs():
    found = judge_placebo(GOOD, NONE, name="none")
    differences = [own - other for own, other in zip(GOOD, NONE, strict=True)]
    assert (found.low, found.high) == pytest.approx(t_interval(differences))
    assert found.difference == pytest.approx(sum(differences) / 5)
    assert found.placebo == "none"


@pytest.mark.parametrize("broken", [[None, *NONE[1:]], NONE[:2]])
def test_there_is_none_where_a_run_diverged_nor_with_two_seeds(broken):
    assert judge_placebo(GOOD[: len(broken)], broken, name="x").low is None
    assert judge_placebo(broken, GOOD[: len(broken)], name="x").difference is None


@pytest.mark.parametrize(
    ("own", "placebo", "effect"),
    [
        (GOOD, BAD, "helps"),
        (BAD, GOOD, "harms"),
        # Better than no gate, but so is the placebo.
        (GOOD, [value - 0.03 for value in GOOD], "not shown"),
        (GOOD, [value + (-1) ** place * 0.02 for place, value in enumerate(GOOD)], "not shown"),
        # Better than the placebo, but not than no gate.
        (
            [value + (-1) ** place * 0.01 for place, value in enumerate(NONE)],
            [value + 0.2 for value in NONE],
            "not shown",
        ),
        (GOOD, [None, *BAD[1:]], "not shown"),
    ],
)
def test_a_mechanism_helps_or_harms_if_control_and_placebo_agree(own, placebo, effect):
    result, placebos = judged(own, placebo)
    assert effect_of(result, placebos) == effect


def test_where_more_is_better_the_other_side_helps():
    result, placebos = judged(BAD, GOOD)
    assert effect_of(result, placebos, lower_is_better=False) == "helps"


def test_every_placebo_must_agree_and_without_one_nothing_is_shown():
    result, (placebo,) = judged(GOOD, BAD)
    other = judge_placebo(GOOD, GOOD[::-1], name="other")
    assert effect_of(result, (placebo, other)) == "not shown"
    assert effect_of(result, ()) == "not shown"
