from pathlib import Path

import pytest

from tidegate.lab.studies.sinks import STUDY
from tidegate.lab.studies.sinks.run import (
    SinksOptions,
    SinksResult,
    TrainedModel,
    heads_of,
    run_sinks,
    shares_of,
)
from tidegate.lab.studies.study import read_record

RECORD = Path(__file__).parents[3] / "docs" / "records" / "gates" / "sinks.json"

OPTIONS = SinksOptions(gates=("none", "sink"), num_layers=2, num_heads=2, length=3, num_seeds=2)


def trained(gate, seed, first_key, sink=None):
    return TrainedModel(
        gate=gate, seed=seed, loss=1.0 + seed, first_key=first_key, sink=sink, contribution=((0.1, 0.1), (0.1, 0.5))
    )


RESULT = SinksResult(
    options=OPTIONS,
    models=(
        trained("none", 0, ((0.2, 0.2), (0.2, 0.6))),
        trained("none", 1, ((0.2, 0.2), (0.2, 0.4))),
        trained("sink", 0, ((0.1, 0.1), (0.1, 0.1)), ((0.5, 0.7), (0.5, 0.7))),
        trained("sink", 1, ((0.1, 0.1), (0.1, 0.1)), ((0.5, 0.7), (0.5, 0.7))),
    ),
)


def test_shares_are_means_over_heads_and_seeds_and_make_up_the_whole():
    none, sink = (shares_of(RESULT.of(gate)) for gate in OPTIONS.gates)
    assert (none.loss, none.first_key) == pytest.approx((1.5, 0.275))
    assert none.sink is None
    assert none.strongest == pytest.approx(0.5)
    assert (sink.first_key, sink.sink, sink.other_keys) == pytest.approx((0.1, 0.6, 0.3))
    assert sink.contribution == pytest.approx(0.2)


def test_even_weights_have_the_mean_of_one_over_the_number_of_keys_on_the_first():
    assert RESULT.even_share == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)


def test_heads_that_have_learned_nothing_spread_their_weight_evenly():
    options = SinksOptions(
        gates=("none", "off-by-one"), d_model=16, num_heads=2, num_layers=1, length=16, steps=1, num_seeds=1,
        batch_size=1, num_validation_tokens=64, learning_rate=1e-9,
    )  # fmt: skip
    result = run_sinks(options)
    none, sink = (shares_of(result.of(gate)) for gate in options.gates)
    assert none.first_key == pytest.approx(result.even_share, rel=0.05)
    # A sink of logit 0 is one more key among those that have a score of nearly 0.
    assert sink.sink == pytest.approx(sink.first_key, rel=0.05)


def test_the_record_has_what_the_documents_say_of_it():
    result = read_record(STUDY, RECORD)
    assert result.options == STUDY.options
    for model in result.models:
        above = [[share > 1.4 * result.even_share for share in layer] for layer in model.first_key]
        assert 1 <= sum(above[0]) <= 2
        assert sum(above[1]) + sum(above[2]) <= 1
        assert max(heads_of([model.contribution])) < 0.1
    assert max(heads_of(model.first_key for model in result.models)) == pytest.approx(0.43, abs=0.01)
    strongest = [max(heads_of([model.sink])) for model in (*result.of("sink"), *result.of("off-by-one"))]
    assert strongest[::2] == pytest.approx([0.83, 0.73], abs=0.01)
    assert max(strongest[1::2]) < 0.2
    assert all(max(heads_of([model.sink[:1]])) < 0.1 for model in (*result.of("sink"), *result.of("off-by-one")))
    assert shares_of(result.of("sink")).first_key == pytest.approx(0.042, abs=5e-4)
    assert shares_of(result.of("none")).first_key == pytest.approx(0.045, abs=5e-4)
    above_none = {
        gate: [model.loss - none.loss for model, none in zip(result.of(gate), result.of("none"), strict=True)]
        for gate in result.options.gates[1:]
    }
    assert above_none.pop("sink") == pytest.approx([0.015, 0.017], abs=5e-4)
    assert all(first > 0 > second for first, second in above_none.values())
