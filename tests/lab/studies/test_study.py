import json
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from errors import rejects

from tidegate._json import add_checksum
from tidegate.lab.studies.catalogue import STUDIES
from tidegate.lab.studies.drawing import save_figures
from tidegate.lab.studies.flat_or_curved import views
from tidegate.lab.studies.options import set_options
from tidegate.lab.studies.study import page_of, read_record, record_of, save_record
from tidegate.lab.training.events import PartsDone

SMALL_MODEL = "num_heads=2 length=16 num_seeds=2"
MINIATURES = {
    "flat-or-curved": "gates=none,g1 strengths=1 num_layers=1 num_planes=2 cap_widths=8",
    "depth": "gates=none,g1 depths=1,2 num_seeds=2 num_planes=2",
    "trained-layers": f"gates=none,g1 {SMALL_MODEL} d_model=16 num_layers=2 steps=2 num_sequences=1 window=6 "
    "sampling.num_positions=2 sampling.num_planes=2",
    "sinks": f"gates=none,sink {SMALL_MODEL} d_model=16 num_layers=2 steps=2 batch_size=2 num_validation_tokens=64",
    "gate-tuning": f"{SMALL_MODEL} hidden_size=16 intermediate_size=16 num_layers=1 num_kv_heads=1 batch_size=2 "
    "training_steps=2 tuning_steps=2 num_validation_tokens=64",
    "boundary": "tasks=steep,xor num_seeds=3 learning_rates=0.01 num_tuning_seeds=1 steps=2 num_points=3",
    "rates": "placements=none,g1 ns=1000,10000,100000 replicates=8 limit_replicates=4 starts=2 start_radii=0.05,0.2 "
    "gate_distances=0.4 num_truths=1 surplus=0 layouts=norms",
}


@pytest.fixture(scope="module", params=STUDIES)
def answered(request):
    """A study, its answer in miniature, and what was reported."""
    study, events = STUDIES[request.param], []
    options = set_options(study.options, MINIATURES[request.param].split())
    result = study.run(options, tell=events.append)
    assert result.options == options
    return study, result, events


def test_every_part_is_reported_from_its_beginning_to_its_end(answered):
    study, *_, events = answered
    assert {type(event) for event in events} == {PartsDone}
    for work in dict.fromkeys(event.work for event in events):
        own = [event for event in events if event.work == work]
        assert [event.done for event in own] == list(range(own[0].total + 1))
    assert events[0].work == study.name


def test_a_record_gives_the_answer_back_to_six_digits(answered, tmp_path):
    study, result, *_ = answered
    path = tmp_path / "new" / "record.json"
    save_record(record_of(study, result), path)
    back = read_record(study, path)
    save_record(record_of(study, back), tmp_path / "again.json")
    assert type(back) is study.result
    assert json.loads((tmp_path / "again.json").read_text())["result"] == json.loads(path.read_text())["result"]


def test_a_record_of_another_study_is_rejected(answered, tmp_path):
    study, *_ = answered
    path = tmp_path / "record.json"
    path.write_text(json.dumps(add_checksum({"study": "weather", "result": {}})))
    with rejects("record", hint="'weather'"):
        read_record(study, path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        (json.dumps({"study": "depth", "result": {}}), ""),
        (json.dumps(add_checksum({"study": "depth"})), "result"),
        (json.dumps(add_checksum({"study": "depth", "result": {"options": 3}})), "result."),
    ],
    ids=["deep", "no digest", "no result", "no fields"],
)
def test_what_is_no_record_is_rejected(text, words, tmp_path):
    (tmp_path / "depth.json").write_text(text)
    with rejects("record", hint=words):
        read_record(STUDIES["depth"], tmp_path / "depth.json")


RECORDS = Path(__file__).parents[3] / "docs" / "records"


@pytest.mark.parametrize(
    "path",
    # These are of no study: the table of model types is counted from `models`, `observe` holds observations.
    sorted(path for path in RECORDS.glob("**/*.json") if path.parent.name not in ("models", "observe")),
    ids=lambda p: f"{p.parent.name}-{p.stem}",
)
def test_every_committed_record_is_whole(path):
    study = STUDIES[path.stem]
    assert type(read_record(study, path)) is study.result


def test_the_page_says_what_was_found(answered):
    study, result, _ = answered
    page = page_of(study, record_of(study, result), result)
    assert page.sections[0].panels[0].paragraphs == (study.finding(result),)
    assert page.sections[0].lead == study.claim


def test_the_command_of_the_page_gives_the_options_again(answered):
    study, result, _ = answered
    page = page_of(study, record_of(study, result), result)
    words = shlex.split(page.sections[-1].panels[0].text)
    assert words[:3] == ["tidegate", "study", study.name]
    settings = [after for before, after in pairwise(words) if before == "--set"]
    base = study.quick if "--quick" in words else study.options
    assert set_options(base, settings) == result.options


def test_a_picture_gives_the_same_file_each_time(answered, tmp_path, monkeypatch):
    study, result, _ = answered
    if study.figures is None:
        # Its page shows everything.
        return
    # Surfaces of flat-or-curved are computed point by point.
    square, disc = views._square, views._disc
    monkeypatch.setattr(views, "_square", lambda reach: square(reach)[::6, ::6])
    monkeypatch.setattr(views, "_disc", lambda: disc()[::4, ::6])
    figures = study.figures(result)
    one, other = (save_figures(figures, tmp_path / folder) for folder in ("one", "other"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]
