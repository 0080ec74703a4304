"""Hostile model folders are rejected with an error: nothing is executed, and little time and memory is used."""

import json

import hostile
import pytest
import victims

SECONDS, MEGABYTES = 2.0, 100


def load(folder, answer, *, tokenizes=False):
    process = victims.start(hostile.load, folder, answer, tokenizes)
    process.join(60)
    assert not victims.kill(process), "it worked for a minute"
    return json.loads(answer.read_text())


@pytest.mark.fault(lambda folder: f"Hostile model: {folder.name}")
@pytest.mark.parametrize("folder", hostile.FOLDERS, ids=lambda folder: folder.name)
def test_a_hostile_folder_does_no_harm(folder, tmp_path, report):
    place, mark, answer = tmp_path / "model", tmp_path / "mark", tmp_path / "answer.json"
    place.mkdir()
    folder.make(place, mark)
    before = set(tmp_path.rglob("*"))
    answered = load(place, answer, tokenizes=folder.tokenizes)
    if folder.refusal:
        assert answered["came"].startswith("refused: ")
        assert str(place) in answered["came"]
        assert folder.refusal in answered["came"]
        assert len(answered["came"]) < 3000
    else:
        assert answered["came"] == "loaded"
    assert set(tmp_path.rglob("*")) - before == {answer}, "something was written"
    assert answered["seconds"] < SECONDS
    assert answered["bytes"] < MEGABYTES * 2**20
    came = "rejected" if folder.refusal else "loaded"
    report(tried=1, outcome=f"{came}, {answered['seconds']:.1f} s, {answered['bytes'] / 2**20:.0f} MiB")


@pytest.mark.parametrize("make", [hostile.llama, hostile.ours], ids=["theirs", "ours"])
def test_a_whole_folder_is_loaded(make, tmp_path):
    (tmp_path / "model").mkdir()
    make(tmp_path / "model")
    assert load(tmp_path / "model", tmp_path / "answer.json")["came"] == "loaded"
