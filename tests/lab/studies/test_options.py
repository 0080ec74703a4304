from dataclasses import replace

import pytest

from tidegate.lab.studies.catalogue import STUDIES
from tidegate.lab.studies.options import format_command, set_options, settings_of
from tidegate.lab.studies.rates import QUICK, RatesOptions
from tidegate.lab.studies.trained_layers import TrainedLayersOptions


def test_settings_are_read_by_the_types_of_the_options():
    options = set_options(RatesOptions(), ["placements=none, g1", "seed=3", "noise=1", "start_radii=0.5,1"])
    assert options == RatesOptions(placements=("none", "g1"), seed=3, noise=1.0, start_radii=(0.5, 1.0))
    assert isinstance(options.noise, float)


def test_words_with_commas_come_in_a_json_list():
    assert set_options(RatesOptions(), ['layouts=["grouped, biases", "norms"]']).layouts == ("grouped, biases", "norms")


def test_an_option_of_an_option_is_set_by_both_names():
    options = set_options(TrainedLayersOptions(), ["sampling.part=block", "sampling.num_planes=2"])
    assert (options.sampling.part, options.sampling.num_planes, options.sampling.num_positions) == ("block", 2, 4)


@pytest.mark.parametrize("name", STUDIES)
def test_all_settings_of_a_study_give_its_options_back(name):
    options = STUDIES[name].options
    assert set_options(options, settings_of(options)) == options


def test_the_command_has_what_differs_from_the_nearer_of_the_two_sizes():
    def command(options):
        return format_command("rates", options, full=RatesOptions(), quick=QUICK)

    assert command(RatesOptions()) == "tidegate study rates"
    assert command(RatesOptions(seed=2)) == "tidegate study rates --set seed=2"
    assert command(replace(QUICK, placements=("g1",))) == "tidegate study rates --quick --set placements=g1"


@pytest.mark.parametrize(
    ("study", "setting", "reason"),
    [
        ("rates", "seed", "must be NAME=VALUE, such as placements="),
        ("rates", "weather=3", "there is no option 'weather'. Known: placements, ns,"),
        ("rates", "seed=early", "seed must be a whole number; got 'early'"),
        ("rates", "noise=loud", "noise must be a number"),
        ("rates", "placements=up", "placements must be among"),
        ("rates", "layouts=[oh", "a list must be JSON"),
        ("trained-layers", "sampling=3", "there is no option 'sampling'"),
        ("trained-layers", "sampling.part=head", "sampling.part must be among attention, block; got 'head'"),
        ("trained-layers", "sampling.num_planes=0", "num_planes must be a positive integer"),
        ("trained-layers", "steps=0", "steps must be at least 1"),
        ("depth", "gates=none,tide", "tide"),
        ("depth", "depths=3", "at least two numbers of layers, each above the last"),
        ("depth", "depths=2,1", "each above the last; got (2, 1)"),
        ("depth", "regimes=calm", "regimes must be among structured, random; got 'calm'"),
        ("depth", "num_seeds=1", "num_seeds must be at least 2; got 1"),
        ("flat-or-curved", "strengths=0", "strengths must be above 0"),
        ("flat-or-curved", "cap_widths=2", "cap_widths must be at least 3"),
        ("boundary", "variants=none,sea", "variants must be among"),
        ("boundary", "variants=g1,bma", "variants must be none and at least one other"),
        ("boundary", "tasks=xor", "tasks must have at least one of half-plane"),
        ("boundary", "learning_rates=-1", "learning_rates must be above 0"),
        ("gate-tuning", "tuning_steps=1", "tuning_steps must be at least 2"),
    ],
)
def test_bad_settings_say_why(study, setting, reason):
    with pytest.raises(ValueError) as refused:  # noqa: PT011, the message is checked below
        set_options(STUDIES[study].options, [setting])
    assert reason in str(refused.value)
