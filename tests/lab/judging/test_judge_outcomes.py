import pytest
from errors import rejects

from tidegate.lab.judging import compare_to_control

NONE = (1.50, 1.62, 1.41, 1.55, 1.48)
G1 = (1.47, 1.60, 1.385, 1.524, 1.452)
BMA = (1.503, 1.615, 1.412, 1.553, 1.479)


def judge(losses, **options):
    return compare_to_control(losses, control="none", **options)


def without(result):
    return (result.low, result.high, result.p_value, result.standard_error, result.critical_value, result.detectable)


class TestDivergence:
    def test_a_diverged_variant_is_counted_and_leaves_the_others_as_they_are_without_it(self):
        diverged = (None, 9.0, None, 1.0, 2.0)
        comparison, plain = (
            judge(rows) for rows in ({"none": NONE, "g1": G1, "x": diverged}, {"none": NONE, "g1": G1})
        )
        assert (comparison["x"].verdict, comparison["x"].num_diverged, comparison["x"].mean) == ("diverged", 2, 4.0)
        assert comparison["x"].difference is None
        assert without(comparison["x"]) == (None,) * 6
        assert comparison["g1"] == plain["g1"]
        assert plain["g1"].degrees_of_freedom == 4

    def test_a_variant_that_never_ends_has_no_mean(self):
        result = judge({"none": NONE, "g1": G1, "x": (None,) * 5})["x"]
        assert (result.verdict, result.num_diverged, result.mean, result.sd) == ("diverged", 5, None, None)

    def test_against_a_diverged_control_nobody_is_judged(self):
        comparison = judge({"none": (None, *NONE[1:]), "g1": G1, "x": (None, *G1[1:])})
        assert [variant.verdict for variant in comparison.variants] == ["control", "undecided", "diverged"]
        assert "none, diverged in 1 of 5 runs" in comparison.refusal
        assert comparison.margin is comparison["g1"].difference is None
        assert comparison["none"].num_diverged == 1

    def test_if_all_variants_diverged_there_is_nothing_to_fit(self):
        comparison = judge({"none": NONE, "x": (None,) * 5})
        assert comparison.residual_sd is comparison.detectable is None
        assert comparison.refusal == ""


class TestFewSeeds:
    @pytest.mark.parametrize("num_seeds", [1, 2])
    def test_fewer_than_three_give_differences_and_no_verdict(self, num_seeds):
        comparison = judge({"none": NONE[:num_seeds], "g1": G1[:num_seeds]})
        assert comparison["g1"].verdict == "undecided"
        assert comparison["g1"].difference < 0
        assert without(comparison["g1"]) == (None,) * 6
        assert f"at least 3 seeds, got {num_seeds}" in comparison.refusal

    def test_three_are_enough(self):
        assert judge({"none": NONE[:3], "g1": G1[:3]})["g1"].verdict == "better"


class TestIdentity:
    def test_equal_figures_in_every_run_are_found_without_being_named(self):
        comparison, plain = judge({"none": NONE, "g1": G1, "same": NONE}), judge({"none": NONE, "g1": G1})
        assert comparison["same"].verdict == "identical"
        assert comparison["same"].difference == 0
        assert comparison["g1"] == plain["g1"]

    def test_named_ones_are_identical_with_any_number_of_seeds(self):
        comparison = judge({"none": NONE[:1], "same": NONE[:1]}, identical=["same"])
        assert comparison["same"].verdict == "identical"
        assert comparison.warnings == ()

    def test_named_ones_with_other_figures_are_warned_of(self):
        comparison = judge({"none": NONE, "g1": G1, "same": BMA}, identical={"same"})
        assert comparison["same"].verdict == "identical"
        assert "same is identical to none, but their losses differ" in comparison.warnings[0]

    def test_one_differing_run_is_enough_to_be_judged(self):
        comparison = judge({"none": NONE, "g1": (*NONE[:4], 1.4801)})
        assert comparison["g1"].verdict == "equivalent"


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "losses", "options"),
    [
        ("control", {"g1": G1, "bma": BMA}, {}),
        ("control", {}, {}),
        ("losses", {"none": NONE}, {}),
        ("losses", {"none": NONE, "g1": G1[:4]}, {}),
        ("losses", {"none": (), "g1": ()}, {}),
        ("losses[g1]", {"none": NONE, "g1": (NAN, *G1[1:])}, {}),
        ("losses[g1]", {"none": NONE, "g1": (1e308, *G1[1:])}, {}),
        ("losses[none]", {"none": (*NONE[:4], INF), "g1": G1}, {}),
        ("margin", {"none": NONE, "g1": G1}, {"margin": -0.1}),
        ("margin", {"none": NONE, "g1": G1}, {"margin": NAN}),
        ("confidence", {"none": NONE, "g1": G1}, {"confidence": 95}),
        ("identical", {"none": NONE, "g1": G1}, {"identical": ["g2"]}),
        ("identical", {"none": NONE, "g1": G1}, {"identical": ["none"]}),
        ("identical", {"none": NONE, "g1": G1}, {"identical": "g1"}),
    ],
)
def test_bad_input_is_named(field, losses, options):
    with rejects(field):
        judge(losses, **options)
