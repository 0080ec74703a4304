"""`tidegate train` from the command to the model, and what reads the model."""

import json
import os
import re
import signal
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from tidegate.cli import app
from tidegate.config import TransformerConfig
from tidegate.lab.training.records import Record, RecordFile
from tidegate.torch import TransformerLM, load_model
from tidegate.torch.retrofit import add_gates

TEXT = "".join(f"{number}: the sum of {number} and {number % 7} is {number + number % 7}.\n" for number in range(300))
SMALL = ["--d-model", "16", "--num-layers", "1", "--num-heads", "2", "--length", "16", "--batch-size", "4"]
SIZES = [*SMALL, "--tokens", "512", "--lr", "1e-2"]
"""Eight updates of a miniature."""

runner = CliRunner()


def invoke(*arguments):
    return runner.invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "sums.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """Folders of two trained models, the first without a gate and with byte pairs."""
    folder = tmp_path_factory.mktemp("trained")
    done = [
        invoke("train", "--gate", "none", "--tokenizer", "bpe:300", "--data", text, "--out", folder / "none", *SIZES),
        invoke("train", "--gate", "g1", "--data", text, "--out", folder / "g1", *SIZES),
    ]
    assert [result.exit_code for result in done] == [0, 0], done[0].output + done[1].output
    return folder, done[1].output


def test_it_says_what_came_of_it_and_keeps_model_log_and_record(trained):
    folder, output = trained
    assert "parameters on 512 tokens" in output
    assert "To load it:\n\nimport tidegate.torch.hf\n" in output
    assert "bits per byte" in output
    assert sorted(file.name for file in (folder / "g1").iterdir()) == [
        "hf",
        "log.jsonl",
        "model.safetensors",
        "records.jsonl",
    ]
    lines = [json.loads(line) for line in (folder / "g1" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["loss"] < lines[0]["loss"]
    (record,) = RecordFile(folder / "g1" / "records.jsonl").read()
    assert record.status == "finished"
    assert str(load_model(folder / "g1" / "model.safetensors").config.gate) == "g1"


def test_transformers_reads_the_same_model(trained):
    folder, _ = trained
    tokens = torch.arange(12)[None]
    for name, kind in (("none", "LlamaForCausalLM"), ("g1", "TidegateForCausalLM")):
        read = AutoModelForCausalLM.from_pretrained(folder / name / "hf")
        assert type(read).__name__ == kind
        torch.testing.assert_close(read(tokens).logits, load_model(folder / name / "model.safetensors")(tokens))
    add_gates(AutoModelForCausalLM.from_pretrained(folder / "none" / "hf"))
    tokenizer = AutoTokenizer.from_pretrained(folder / "none" / "hf")
    assert tokenizer.decode(tokenizer("the sum of 5\n").input_ids) == "the sum of 5\n"
    assert len(tokenizer) <= 300


def test_observe_and_curvature_read_it_with_its_own_tokens(trained, text, tmp_path):
    folder, _ = trained
    observed = invoke(
        "observe", folder / "none", "--data", text, "--out", tmp_path / "seen", "--length", 8, "--sequences", 2
    )
    assert observed.exit_code == 0, observed.output
    measured = invoke(
        "curvature", folder / "g1", "--data", text, "--out", tmp_path / "bent",
        "--length", 4, "--sequences", 1, "--positions", 1, "--planes", 1,
    )  # fmt: skip
    assert measured.exit_code == 0, measured.output


def test_the_same_command_again_trains_nothing_and_another_is_refused(trained, text):
    folder, _ = trained
    before = (folder / "g1" / "model.safetensors").stat().st_mtime_ns
    again = invoke("train", "--gate", "g1", "--data", text, "--out", folder / "g1", *SIZES)
    assert again.exit_code == 0
    assert "Already trained" in again.output
    assert (folder / "g1" / "model.safetensors").stat().st_mtime_ns == before
    other = invoke("train", "--gate", "bma", "--data", text, "--out", folder / "g1", *SIZES)
    assert other.exit_code == 2
    assert "model.gate is" in other.output


def test_it_stops_and_goes_on_to_the_same_model(trained, text, tmp_path, monkeypatch):
    from tidegate.lab.training.outputs import RunLog

    folder, _ = trained
    report = RunLog.report

    def interrupt(log, event):
        report(log, event)
        if event.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "report", interrupt)
        stopped = invoke("train", "--gate", "g1", "--data", text, "--out", tmp_path, *SIZES)
    assert stopped.exit_code == 130, stopped.output
    assert "All progress is saved; resume with" in stopped.output
    assert not (tmp_path / "model.safetensors").exists()
    done = invoke("train", "--gate", "g1", "--data", text, "--out", tmp_path, *SIZES)
    assert done.exit_code == 0, done.output
    for file in ("model.safetensors", "hf/model.safetensors"):
        assert (tmp_path / file).read_bytes() == (folder / "g1" / file).read_bytes()
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 9))
    assert not (tmp_path / "checkpoints").exists()


def test_an_interrupt_before_the_first_checkpoint_does_not_speak_of_going_on(text, tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("tidegate.lab.training.train.execute_run", interrupt)
    stopped = invoke("train", "--data", text, "--out", tmp_path, *SIZES)
    assert (stopped.exit_code, "Nothing was saved yet; start again with" in stopped.stderr) == (130, True)


def test_all_options_of_the_engine_train_together(text, tmp_path):
    done = invoke(
        "train", "--data", text, "--out", tmp_path, *SIZES, "--precision", "bf16", "--accumulate", 2,
        "--checkpoint-activations", "--optimizer", "muon", "--num-kv-heads", 1, "--tensorboard", "--seed", 3,
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (record,) = RecordFile(tmp_path / "records.jsonl").read()
    expected = {"precision": "bf16", "accumulate": 2, "optimizer": "muon"}
    assert {name: getattr(record.run.training, name) for name in expected} == expected
    assert record.run.model.checkpoint_blocks
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_dry_run_says_what_it_takes_here_and_there_and_writes_nothing(text, tmp_path):
    out = tmp_path / "out"
    done = invoke("train", "--data", text, "--out", out, *SIZES, "--dry-run", "--flops", "4e14", "--mfu", "0.5")
    assert done.exit_code == 0, done.output
    output = " ".join(done.output.split())
    assert "8 updates of 64" in output
    assert "at 0.5 of 4e+14 FLOP/s" in output
    weights = 4 * 4 * int(re.search(r"parameters ([\d,]+)", output)[1].replace(",", ""))
    assert f"{weights / 2**20:.2f} MiB for weights" in output
    assert re.search(r"time here [\d.]+ (s|min) ", output)
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--accumulate", 3], "--accumulate must be a divisor of batch_size"),
        (["--gate", "g1@params=none"], "options of a comparison"),
        (["--gate", "nonsense"], "nonsense"),
        (["--device", "quantum"], "--device must be one that can be used here"),
        (["--lr", "-1"], "--lr must be a finite number above 0"),
        (["--num-heads", 3], "num_heads"),
        (["--dry-run", "--flops", "1e12", "--mfu", "2"], "--mfu must be in (0, 1]"),
        (["--flops", "nan"], "--flops must be a finite number above 0"),
        (["--out", "{data}/out"], "--out must be outside"),
        (["--gate", "g1@placebo=shuffled", "--accumulate", 2], "--accumulate must be 1 with the gate"),
        (["--gate", "key:input:head@qk_norm=yes"], "--gate must be without qk_norm"),
    ],
)
def test_bad_input_is_one_line_with_the_option(text, tmp_path, options, message):
    options = [str(value).format(data=text.parent) for value in options]
    done = invoke("train", "--data", text.parent, "--out", tmp_path / "out", *SIZES, *options)
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "out").exists()


def test_a_dry_run_of_several_processes_says_what_each_holds(text):
    def said(*options):
        done = invoke("train", "--data", text, *SIZES, "--dry-run", "--json", *options)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    alone, rows, shards = said(), said("--nproc", 2), said("--nproc", 2, "--parallel", "fsdp")
    weights, activations = alone["weight_bytes"], alone["activation_bytes"]
    assert alone["bytes_in_each_process"] == weights + activations
    assert rows["bytes_in_each_process"] == pytest.approx(weights + activations / 2, abs=1)
    assert shards["bytes_in_each_process"] == pytest.approx((weights + activations) / 2, abs=1)
    heads = said("--nproc", 2, "--parallel", "tp")["bytes_in_each_process"]
    assert activations + weights / 2 < heads < activations + weights
    output = invoke("train", "--data", text, *SIZES, "--dry-run", "--nproc", 2).output
    assert "memory per process" in output


def test_a_run_that_failed_does_not_keep_its_folder(trained, text, tmp_path):
    (other,) = RecordFile(trained[0] / "g1" / "records.jsonl").read()
    failed = Record(id=other.id, run=other.run, status="failed", error="out of memory")
    RecordFile(tmp_path / "records.jsonl").append(failed)
    done = invoke("train", "--data", text, "--out", tmp_path, *SIZES)
    assert done.exit_code == 0, done.output


def test_a_training_that_diverges_ends_with_a_word_on_the_remedy(text, tmp_path):
    done = invoke("train", "--data", text, "--out", tmp_path, *SIZES, "--lr", "1e6")
    assert done.exit_code == 1
    assert "Choose a smaller --lr" in done.output


def test_another_models_tokenizer_beside_a_model_is_refused(trained, tmp_path):
    folder, _ = trained
    (tmp_path / "model.safetensors").write_bytes((folder / "g1" / "model.safetensors").read_bytes())
    (tmp_path / "tokenizer.json").write_text((folder / "none" / "tokenizer.json").read_text())
    done = invoke("observe", tmp_path, "--out", tmp_path / "seen", "--length", 8)
    assert done.exit_code == 2
    assert "another model" in done.output
    (tmp_path / "tokenizer.json").write_text("{")
    done = invoke("observe", tmp_path, "--out", tmp_path / "seen", "--length", 8)
    assert (done.exit_code, "a byte-pair tokenizer" in done.output) == (2, True)


def test_generate_evaluate_and_export_read_it(trained, text, tmp_path):
    folder, _ = trained
    options = ["--prompt", "7: the sum", "--tokens", 12, "--temperature", 0]
    for name in ("none", "g1"):
        written = invoke("generate", folder / name, *options)
        assert written.exit_code == 0, written.output
        assert written.output.startswith("7: the sum")
        found = invoke("evaluate", folder / name, "--data", text, "--sequences", 8)
        assert found.exit_code == 0, found.output
        assert "bits per byte" in found.output
        exported = invoke("export", folder / name, "--out", tmp_path / name)
        assert exported.exit_code == 0, exported.output
        tokens = torch.arange(9)[None]
        # The lines that it prints read what it wrote.
        found = {}
        exec(exported.stdout.partition("To load it:\n")[2], found)
        read = found["model"]
        torch.testing.assert_close(read(tokens).logits, load_model(folder / name / "model.safetensors")(tokens))
        assert ("import tidegate.torch.hf" in exported.stdout) == (name == "g1")
        assert ("tokenizer" in found) == (name == "none")
    again = invoke("export", folder / "g1", "--out", tmp_path / "g1")
    assert (again.exit_code, "--out must be a new or empty folder" in again.output) == (2, True)
    refused = invoke("export", folder / "g1", "--out", tmp_path / "next", "--to", "qwen3-next")
    assert (refused.exit_code, "qk_norm" in refused.output) == (2, True)
    for verb in (["generate", *options], ["evaluate", "--data", text], ["export", "--out", tmp_path / "again"]):
        theirs = invoke(verb[0], folder / "none" / "hf", *verb[1:])
        message = f"a LlamaForCausalLM in {folder / 'none' / 'hf'}"
        assert (theirs.exit_code, theirs.stdout, message in theirs.stderr) == (2, "", True), theirs.output
    empty = invoke("generate", folder / "g1", "--prompt", "")
    assert (empty.exit_code, "--prompt must be at least one token" in empty.output) == (2, True)
    wrong = invoke("generate", folder / "g1", *options, "--top-p", "2")
    assert (wrong.exit_code, wrong.stdout) == (2, "")


def test_a_folder_of_our_own_class_for_transformers_is_read_as_the_model_it_was_made_of(trained, text, tmp_path):
    folder, _ = trained
    for verb in (["generate", "--prompt", "7: the", "--tokens", 9], ["evaluate", "--data", text, "--json"]):
        own, exported = (invoke(verb[0], folder / "g1" / place, *verb[1:]) for place in (".", "hf"))
        assert exported.exit_code == 0, exported.output
        assert exported.stdout == own.stdout.replace('"model": "g1"', '"model": "hf"')
    watched = invoke("observe", folder / "g1" / "hf", "--data", text, "--sequences", 2, "--out", tmp_path, "--json")
    assert watched.exit_code == 0, watched.output
    assert json.loads(watched.stdout)["results"]["length"] == 16


def test_a_preset_with_byte_pairs_takes_tokens_as_they_are(text, tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(4000, dtype=np.uint16) % 300)
    assert invoke("tokenize", text, "--out", tmp_path / "shards").exit_code == 0
    for data, count in ((tmp_path / "tokens.npy", 300), (tmp_path / "shards", 256)):
        command = ["train", "--preset", "124m", "--data", data, "--dry-run", *SMALL]
        found = invoke(*command)
        assert found.exit_code == 0, found.output
        model = TransformerLM(TransformerConfig(gate="bma", d_model=16, num_layers=1, num_heads=2, vocab_size=count))
        assert f"{model.num_parameters():,}" in found.output
        refused = invoke(*command, "--tokenizer", "bpe:300")
        assert (refused.exit_code, "--tokenizer must be" in refused.output) == (2, True)


def test_shards_are_read_through_before_a_training_and_not_for_a_dry_run(text, tmp_path):
    assert invoke("tokenize", text, "--out", tmp_path / "shards").exit_code == 0
    shard = next((tmp_path / "shards").glob("*.bin"))
    content = bytearray(shard.read_bytes())
    content[0] ^= 1
    shard.write_bytes(content)
    command = ["train", "--data", tmp_path / "shards", "--out", tmp_path / "out", *SIZES]
    dry = invoke(*command, "--dry-run")
    assert dry.exit_code == 0, dry.output
    refused = invoke(*command)
    assert (refused.exit_code, shard.name in refused.output) == (2, True), refused.output
    assert not (tmp_path / "out").exists()


def test_an_evaluation_is_printed_as_json_and_kept_in_a_file(trained, text, tmp_path):
    folder, _ = trained
    options = ["--data", text, "--sequences", 8, "--quiet", "--json"]
    found = invoke("evaluate", folder / "g1", *options, "--out", tmp_path / "kept" / "loss.json")
    assert found.exit_code == 0, found.output
    result = json.loads(found.stdout)
    assert result == json.loads((tmp_path / "kept" / "loss.json").read_text())
    figures = {"loss", "num_tokens", "num_bytes", "num_text_tokens", "perplexity", "bits_per_byte"}
    assert set(result) == {"model"} | figures
    assert (result["model"], result["num_tokens"], result["num_text_tokens"]) == ("g1", 8 * 16, len(TEXT) - 1)


def test_a_text_is_evaluated_whole_and_a_sample_of_it_is_called_one(trained, text):
    command = ["evaluate", trained[0] / "g1", "--data", text, "--quiet"]
    whole = invoke(*command)
    assert f"g1 on the whole text, {len(TEXT) - 1:,} tokens, {len(TEXT) - 1:,} bytes: loss" in whole.output
    sample = invoke(*command, "--sequences", 8)
    assert f"g1 on {128 / (len(TEXT) - 1):.2%} of the text, 128 tokens, 128 bytes: loss" in sample.output


def test_shards_are_evaluated_and_observed_as_their_text_is(trained, text, tmp_path):
    model, shards, pairs = trained[0] / "g1", tmp_path / "shards", tmp_path / "pairs"
    for verb in (["evaluate", model, "--json"], ["observe", model, "--out", tmp_path / "seen", "--json", "--quiet"]):
        assert invoke("tokenize", text, "--out", shards, "--quiet").exit_code == 0
        whole, of_shards = (invoke(*verb, "--data", data) for data in (text, shards))
        assert of_shards.exit_code == 0, of_shards.output
        assert of_shards.stdout == whole.stdout
    assert invoke("tokenize", text, "--tokenizer", "bpe:300", "--out", pairs, "--quiet").exit_code == 0
    refused = invoke("evaluate", model, "--data", pairs)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "Pass the text itself" in refused.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tasks", "a.yaml", "--data", "x.txt"], "--data must be left out"),
        (["--limit", 3], "--limit must be left out"),
        (["--tasks", "a.yaml", "--sequences", 3], "--sequences must be left out"),
        (["--tasks", " , "], "--tasks must be at least one"),
        (["--out", "."], "--out must be a file name"),
    ],
)
def test_options_of_an_evaluation_that_would_be_passed_over_are_refused(trained, options, message):
    found = invoke("evaluate", trained[0] / "g1", *options)
    assert (found.exit_code, message in found.output) == (2, True), found.output


def test_tasks_without_the_harness_name_the_extra_that_brings_it(trained, monkeypatch):
    for name in ["lm_eval", *(name for name in sys.modules if name.startswith("lm_eval."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "tidegate.lab.models.evaluate", raising=False)
    found = invoke("evaluate", trained[0] / "g1", "--tasks", "own.yaml")
    assert (found.exit_code, "pip install 'tidegate[eval]'" in found.output) == (2, True), found.output


# The harness takes seconds to import.
@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_tasks_are_scored_in_a_table_and_as_json(trained, tmp_path):
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in TEXT.splitlines()[:9]))
    (tmp_path / "own.yaml").write_text(
        f"task: sums\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test\n"
        "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\n"
        "metric_list:\n  - metric: bits_per_byte\n"
    )
    command = ["evaluate", trained[0] / "none", "--tasks", tmp_path / "own.yaml", "--quiet"]
    table = invoke(*command)
    assert table.exit_code == 0, table.output
    assert "bits_per_byte" in table.stdout
    # The harness has no standard error of it.
    assert "±" not in table.stdout
    (score,) = json.loads(invoke(*command, "--json").stdout)["scores"]
    assert (score["task"], score["num_samples"], score["metric"]) == ("sums", 9, "bits_per_byte")
    assert f"{score['value']:.4f}" in table.stdout
