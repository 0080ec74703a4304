"""Model folders made to harm are refused in words: nothing is executed, little time and memory is spent."""

import json

import hostile
import pytest
import victims

SECONDS, MEGABYTES = 2.0, 100
FEW = ("pickled weights", "code by auto map", "missing tensor", "million layers", "our million layers", "nested config")
"""Those that `make test` tries; the others are refused by the same checks."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.torture) for name in hostile.FOLDERS]
)
def test_a_hostile_folder_is_refused(name, tmp_path, report):
    folder, mark, answer = tmp_path / "model", tmp_path / "mark", tmp_path / "answer.json"
    folder.mkdir()
    hostile.FOLDERS[name](folder, mark)
    process = victims.start(hostile.load, folder, answer)
    process.join(60)
    assert not victims.kill(process), "it worked for a minute"
    answered = json.loads(answer.read_text())
    assert answered["came"].startswith("refused: ")
    assert str(folder) in answered["came"]
    assert len(answered["came"]) < 3000
    assert not mark.exists()
    assert answered["seconds"] < SECONDS
    assert answered["bytes"] < MEGABYTES * 2**20
    report(
        f"A model folder with {name}",
        tried=1,
        outcome=f"refused, nothing executed, {answered['seconds']:.1f} s, {answered['bytes'] / 2**20:.0f} MiB",
    )


def test_a_whole_folder_is_loaded(tmp_path):
    """It comes as far as the tokenizer, which a folder of random weights does not have."""
    hostile.llama(tmp_path / "model")
    answer = tmp_path / "answer.json"
    victims.start(hostile.load, tmp_path / "model", answer).join()
    assert "tokenizer" in json.loads(answer.read_text())["came"]
