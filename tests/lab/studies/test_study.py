import json

import pytest

from tidegate.lab.studies.boundary import run as boundary
from tidegate.lab.studies.boundary import training as boundary_training
from tidegate.lab.studies.catalogue import STUDIES
from tidegate.lab.studies.depth import run as depth
from tidegate.lab.studies.drawing import save_figures
from tidegate.lab.studies.flat_or_curved import run as flat_or_curved
from tidegate.lab.studies.gate_tuning import run as gate_tuning
from tidegate.lab.studies.study import page_of, read_record, record_of, save_record
from tidegate.lab.studies.trained_layers import run as trained_layers
from tidegate.report.page import Page

IN_MINIATURE = {
    "flat-or-curved": lambda: flat_or_curved.flat_or_curved(
        flat_or_curved.Options(gates=("none", "g1"), strengths=(1.0,), num_layers=1, num_planes=2, cap_widths=(8,))
    ),
    "depth": lambda: depth.depth_study(depth.Options(gates=("none", "g1"), depths=(1, 2), num_seeds=2, num_planes=2)),
    "trained-layers": lambda: trained_layers.trained_layers(
        trained_layers.Options(
            gates=("none", "g1"), d_model=16, num_heads=2, num_layers=2, length=16, steps=2, window=6
        )
    ),
    "gate-tuning": lambda: gate_tuning.gate_tuning(
        gate_tuning.Options(
            hidden_size=16,
            intermediate_size=16,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            length=16,
            batch_size=2,
            training_steps=2,
            tuning_steps=2,
            num_validation_tokens=64,
            num_seeds=2,
        )
    ),
    "boundary": lambda: boundary.boundary_study(
        boundary_training.Options(
            tasks=("steep", "xor"), num_seeds=3, learning_rates=(0.01,), num_tuning_seeds=1, steps=2, num_points=3
        )
    ),
}


@pytest.fixture(scope="module", params=STUDIES)
def answered(request):
    study = STUDIES[request.param]
    return study, IN_MINIATURE[request.param]()


def test_a_record_gives_the_answer_back_to_six_digits(answered, tmp_path):
    study, result = answered
    path = tmp_path / "new" / "record.json"
    save_record(record_of(study, result), path)
    back = read_record(study, path)
    save_record(record_of(study, back), tmp_path / "again.json")
    assert type(back) is study.result
    assert json.loads((tmp_path / "again.json").read_text())["result"] == json.loads(path.read_text())["result"]


def test_a_record_of_another_study_is_refused(answered, tmp_path):
    study, _ = answered
    path = tmp_path / "record.json"
    path.write_text('{"study": "weather", "result": {}}')
    with pytest.raises(ValueError, match=f"must be a record of {study.name}; it is one of 'weather'"):
        read_record(study, path)


def test_the_page_says_what_was_found_and_goes_through_json(answered):
    study, result = answered
    page = page_of(study, record_of(study, result), result)
    assert page.sections[0].panels[0].paragraphs == (study.finding(result),)
    assert Page.from_json(page.to_json()).sections == page.sections


def test_a_figure_gives_the_same_file_each_time(answered, tmp_path):
    study, result = answered
    figures = study.draw(result)
    one, other = (save_figures(figures, tmp_path / folder) for folder in ("one", "other"))
    assert one
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]
