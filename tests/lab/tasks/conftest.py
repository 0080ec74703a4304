import json

import numpy as np
import pytest

SENTENCES = [f"{number}: the sum of {number} and {number % 7} is {number + number % 7}.\n" for number in range(2000)]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path_factory, monkeypatch):
    """Tokens that a test keeps are its own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def records():
    """Makes of a folder what a comparison leaves behind."""

    def write(folder):
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "checkpoints" / "run.txt").write_text("half a run")
        (folder / "records.jsonl").write_text('{"command": "compare", "kind": "plan"}\n{"id": "1", "kind": "run"}\n')
        (folder / "report.md").write_text("# Which gate is better")

    return write


@pytest.fixture
def sentences():
    return SENTENCES


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "sums.txt"
    path.write_text("".join(SENTENCES))
    return path


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "library"
    for number in range(40):
        path = root / f"shelf{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(SENTENCES[number * 50 : number * 50 + 50]))
    return root


@pytest.fixture
def json_lines(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps({"body": text, "id": number}) for number, text in enumerate(SENTENCES)))
    return path


@pytest.fixture
def token_file(tmp_path):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(5000, dtype=np.uint16) % 777)
    return path
