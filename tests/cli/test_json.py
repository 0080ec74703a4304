"""Every verb gives its result to other programs: with --json, one JSON value on the standard output alone."""

import json

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from tidegate.cli.app import app

SIZES = ["--d-model", 16, "--num-layers", 1, "--num-heads", 2, "--length", 16, "--batch-size", 4, "--tokens", 256]
TEXT = "".join(f"{number} and {number % 7} make {number + number % 7}.\n" for number in range(400))
DEPTH = ["--set", "gates=none", "--set", "depths=1,2", "--set", "num_seeds=2", "--set", "num_planes=2"]


def result_of(*arguments):
    done = CliRunner().invoke(app, [str(argument) for argument in (*arguments, "--json")])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("json")
    (place / "text.txt").write_text(TEXT)
    return place


@pytest.fixture(scope="module")
def trained(folder):
    return result_of("train", "--gate", "none", "--data", folder / "text.txt", "--out", folder / "model", *SIZES)


def test_every_verb_has_the_option():
    verbs = get_command(app).commands
    without = [name for name, verb in verbs.items() if not any("--json" in option.opts for option in verb.params)]
    assert verbs
    assert without == []


def test_train_gives_its_record_and_where_the_model_is(trained, folder):
    assert trained["model"] == str(folder / "model" / "model.safetensors")
    assert trained["record"]["tokens"] == 256
    again = result_of("train", "--gate", "none", "--data", folder / "text.txt", "--out", folder / "model", *SIZES)
    assert again["trained_before"]
    assert again["record"]["loss"] == trained["record"]["loss"]


def test_a_dry_run_gives_its_estimate(folder):
    found = result_of("train", "--data", folder / "text.txt", "--dry-run", "--flops", 1e12, *SIZES)
    assert found["tokens"] == 256
    assert found["hours_there"] == pytest.approx(found["flops"] / 1e12 / 0.4 / 3600)


def test_tokenize_gives_its_index(folder):
    found = result_of("tokenize", folder / "text.txt", "--out", folder / "shards")
    assert sum(shard["num_tokens"] for shard in found["shards"]) == len(TEXT)


def test_generate_gives_prompt_and_text(trained):
    found = result_of("generate", trained["model"], "--prompt", "1 and", "--tokens", 5)
    assert found["prompt"] == "1 and"
    assert found["text"]


def test_export_gives_the_class_and_the_folder(trained, folder):
    found = result_of("export", trained["model"], "--out", folder / "hf")
    assert found == {"class": "LlamaForCausalLM", "folder": str(folder / "hf")}


def test_observe_and_curvature_give_what_their_pages_are_made_of(trained, folder):
    data = ["--data", folder / "text.txt", "--length", 8, "--sequences", 2]
    seen = result_of("observe", trained["model"], *data, "--out", folder / "seen")
    bent = result_of("curvature", trained["model"], *data, "--positions", 1, "--planes", 1, "--out", folder / "bent")
    for found, name in ((seen, "seen"), (bent, "bent")):
        assert found["results"] == json.loads((folder / name / "results.json").read_text())


def test_a_study_gives_its_record_its_options_and_the_list(folder):
    found = result_of("study", "depth", *DEPTH, "--out", folder / "depth")
    assert found["results"]["finding"]
    assert result_of("study", "depth", *DEPTH, "--options")["depths"] == [1, 2]
    assert "depth" in {study["name"] for study in result_of("study", "list")}


def test_compare_and_report_give_what_their_page_is_made_of(folder):
    variants = ["--variants", "none,g1", "--no-placebos", "--seeds", 1, "--tokens", 2048, "--length", 16]
    out = ["--out", folder / "compared"]
    found = result_of("compare", "--data", folder / "text.txt", "--executor", "serial", *variants, *out)
    assert found["results"] == result_of("report", folder / "compared")["results"]
    assert {variant["name"] for variant in found["results"]["variants"]} == {"none", "g1"}


def test_explore_gives_the_page(folder):
    found = result_of("explore", "--no-open", "--out", folder / "explore.html")
    assert found == {"page": str(folder / "explore.html"), "opened": False}
