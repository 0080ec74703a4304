from dataclasses import replace

from lab_lines import diverged
from lab_runs import tampered

from tidegate.lab.compare.page import layer_sections
from tidegate.lab.compare.summary import summarise
from tidegate.lab.training.measurements import LayerGauge
from tidegate.lab.training.records import LayerMeasurements


def sections(lines):
    return list(layer_sections(summarise(lines)))


def layer(free, values, predicted):
    return LayerGauge(layer="0", free=free, predicted=predicted, singular_values=tuple(map(tuple, values)))


def test_free_directions_stand_beside_the_theory_and_the_others_have_a_hold(compared):
    none = layer((4, 4), [[0.0] * 4] * 2, 4)
    gated = layer((2, 1), [[0.4, 0.2, 0.0, 0.0], [0.6, 0.4, 0.1, 0.0]], 2)
    first = next(line for line in compared if isinstance(line, LayerMeasurements))
    lines = [replace(line, gauge=(none, gated)) if line is first else line for line in compared]
    assert sections(lines)[1].panels[0].rows[:2] == (
        ("none", 0, 4, 4, 4, 4, None, None),
        ("none", 1, 4, 2, 1, 2, "4.0e-01", "1.0e-01"),
    )


def test_it_says_why_layers_were_not_measured(compared):
    gone = {"curvature": None, "curvature_reason": "a plane is degenerate"}
    first = next(line for line in compared if isinstance(line, LayerMeasurements))
    *_, bent, why = sections([replace(line, **gone) if line is first else line for line in compared])[0].panels
    assert {row[0] for row in bent.rows} == {"g1", "bma-query"}
    assert why.paragraphs == ("Not measured for none: a plane is degenerate.",)


def test_it_says_that_no_measurement_is_on_record_and_that_a_run_diverged(compared):
    lines = tampered([line for line in compared if not isinstance(line, LayerMeasurements)], "g1", diverged)
    for section in sections(lines):
        (why,) = section.panels
        assert [reason.partition(":")[0] for reason in why.paragraphs] == [
            "Not measured for none, bma-query",
            "Not measured for g1",
        ]
