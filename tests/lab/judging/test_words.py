import re

import pytest

from tidegate.lab.judging import compare_to_control, effect_of, effect_sentence, judge_placebo, rule_text

LOSSES = {
    "none": (1.500, 1.620, 1.410, 1.550, 1.480),
    "g1": (1.488, 1.605, 1.399, 1.539, 1.467),
    "bma": (1.532, 1.649, 1.441, 1.583, 1.509),
    "odd": (1.503, 1.614, 1.412, 1.553, 1.476),
    "lost": (1.5, None, 1.4, None, 1.5),
    "alias": (1.500, 1.620, 1.410, 1.550, 1.480),
}
CHANGE = (
    r"(?:changes|has an estimated effect on) the loss (?:by|of) "
    r"([+−][\d.]+) % \(95 % CI ([+−][\d.]+) % to ([+−][\d.]+) %\)"
)


def judge(losses=LOSSES, **options):
    return compare_to_control(losses, control="none", unit="nats", **options)


def numbers_in(sentence):
    """The estimate and the ends of its interval, in percent."""
    return [float(number.replace("−", "-")) for number in re.search(CHANGE, sentence).groups()]


def percents(comparison, result):
    return [100 * number / comparison["none"].mean for number in (result.difference, result.low, result.high)]


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("g1", r"significantly better than the baseline, by 0\.\d\d % to 1\.\d\d %"),
        ("bma", r"significantly worse than the baseline, by 1\.\d\d % to 2\.\d\d %"),
        ("odd", r"no significant difference; a decrease of more than .* is ruled out; detecting .*"),
    ],
)
def test_a_verdict_leads_with_the_estimate_and_says_what_the_interval_rules_out(name, ending):
    comparison = judge()
    result = comparison[name]
    assert re.fullmatch(f"{name} {CHANGE}: {ending}", result.sentence)
    assert numbers_in(result.sentence) == pytest.approx(percents(comparison, result), abs=5e-3)
    if name == "odd":
        less, more = re.search(
            r"decrease of more than (.*) % or an increase of more than (.*) % is", result.sentence
        ).groups()
        assert (float(less), float(more)) == pytest.approx(
            (-numbers_in(result.sentence)[1], result.high / 0.01512), 0.1
        )


def test_an_inconclusive_variant_is_told_the_seeds_that_detect_it_and_their_time():
    comparison = judge(time_of=lambda number: f"{3 * number} h")
    found = re.search(
        r"; detecting the margin of 0\.20 % would take (\d+) seeds \((\d+) h\)$", comparison["odd"].sentence
    )
    seeds, hours = map(int, found.groups())
    assert hours == 3 * seeds > 3 * 5
    assert comparison.relative_margin == 0.002
    assert judge()["odd"].sentence.endswith(f"would take {seeds} seeds")


def test_a_difference_inside_the_margin_is_equivalent_even_if_significant():
    comparison = judge(margin=0.1)
    for name in ("g1", "odd"):
        assert ": equivalent to the baseline within ±10 %" in comparison[name].sentence
        assert ("significant but smaller" in comparison[name].sentence) == (name == "g1")


def test_if_more_is_better_gains_are_above_zero():
    sentence = judge(lower_is_better=False)["g1"].sentence
    assert "changes the metric by −" in sentence
    assert re.search("significantly worse than the baseline, by 0.* to 1", sentence)


def test_those_who_are_not_judged_are_told_why():
    comparison = judge()
    assert (
        comparison["none"].sentence == "none is the baseline: mean 1.5120 nats (standard deviation 0.0785) over 5 seeds"
    )
    assert "diverged in 2 of 5 seeds" in comparison["lost"].sentence
    assert "identical to the baseline" in comparison["alias"].sentence
    single = judge({name: row[:1] for name, row in LOSSES.items() if name != "lost"})
    assert single["g1"].sentence.endswith(f"no verdict, because {single.refusal}")
    assert single.refusal in rule_text(single)
    diverged = judge({"none": (None, 1.4, 1.5), "g1": (1.4, 1.4, 1.5)})
    assert "diverged in 1 of 3 seeds" in diverged["none"].sentence
    assert "±0.2 % of the baseline's mean loss" in rule_text(diverged)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_percentages_do_not_depend_on_the_unit(scale):
    scaled = {name: tuple(None if value is None else value * scale for value in row) for name, row in LOSSES.items()}
    assert judge(scaled)["g1"].sentence == judge()["g1"].sentence


def test_differences_from_a_baseline_of_zero_are_in_their_unit():
    rows = {"none": (-1.0, 1.0, 0.5, -0.5), "g1": (0.0, 2.1, 1.4, 0.6)}
    assert re.match(r"g1 changes the loss by \+1\.\d+ nats \(95 % CI", judge(rows)["g1"].sentence)


def test_the_sentence_on_placebos_has_each_contrast_and_the_effect():
    comparison = judge()
    result, losses = comparison["g1"], {name: list(row) for name, row in LOSSES.items()}
    worse, lost = (judge_placebo(losses["g1"], losses[name], name=name) for name in ("bma", "lost"))
    same = judge_placebo(losses["g1"], losses["none"], name="none")
    sentence = effect_sentence(result, (worse,), effect_of(result, (worse,)), comparison)
    assert re.match(
        r"g1: −0\.82 % \(95 % CI .*\) compared with the baseline; −2\.86 % \(.*\) compared with its placebo", sentence
    )
    assert sentence.endswith("compared with its placebo bma. The mechanism helps.")
    not_shown = effect_sentence(result, (worse, lost), effect_of(result, (worse, lost)), comparison)
    assert "no estimate compared with its placebo lost" in not_shown
    assert not_shown.endswith("is not shown to help or to harm: there is no interval against its placebo lost.")
    own = effect_sentence(result, (same,), effect_of(result, (same,)), comparison)
    assert "its placebo none" not in own
    assert own.endswith("At initialization it equals the baseline, which is its placebo.")
    small = judge(margin=0.1)
    assert "helps, by less than the margin" in effect_sentence(small["g1"], (worse,), "helps", small)
    assert effect_sentence(result, (), "not shown", comparison) == ""
