from dataclasses import replace

import pytest
from errors import rejects

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
    ("study", "setting", "field"),
    [
        ("rates", "seed", "settings"),
        ("rates", "weather=3", "settings"),
        ("rates", "noise=loud", "noise"),
        ("rates", "placements=up", "placements"),
        ("rates", "layouts=plain,odd", "layouts"),
        ("rates", "seed=-1", "seed"),
        ("rates", "ns=100,1000", "ns"),
        ("rates", "gate_distances=0", "gate_distances"),
        ("trained-layers", "sampling=3", "settings"),
        ("trained-layers", "sampling.part=head", "sampling.part"),
        ("depth", "depths=3", "depths"),
        ("depth", "regimes=calm", "regimes"),
        ("flat-or-curved", "strengths=0", "strengths"),
        ("boundary", "variants=none,sea", "variants"),
        ("boundary", "tasks=xor", "tasks"),
        ("boundary", "learning_rates=-1", "learning_rates"),
        ("gate-tuning", "tuning_steps=1", "tuning_steps"),
    ],
)
def test_bad_settings_name_the_option(study, setting, field):
    with rejects(field):
        set_options(STUDIES[study].options, [setting])


@pytest.mark.parametrize(
    ("study", "setting"), [("depth", "gates=none,tide"), ("trained-layers", "sampling.num_planes=0")]
)
def test_values_are_checked_where_they_are_used(study, setting):
    with pytest.raises(ValueError, match=r"tide|num_planes"):
        set_options(STUDIES[study].options, [setting])
