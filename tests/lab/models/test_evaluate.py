"""Our models on tasks of lm-evaluation-harness, compared with our own evaluation."""

import importlib
import json
import string
from pathlib import Path

import numpy as np
import pytest
import torch
from closeness import assert_close
from errors import rejects
from torch.nn import functional as F

from tidegate.config import TransformerConfig
from tidegate.lab.models.language_models import make_language_model
from tidegate.lab.models.text import continuations, continue_text, text_loss
from tidegate.lab.tasks.documents import Document
from tidegate.lab.tasks.tokenizer import portable_tokenizer, trained_tokenizer
from tidegate.torch import TransformerLM

LENGTH = 24
SOURCE = Path(string.__file__).read_text()
"""One of Python's own sources."""


def model_with(tokenizer="", vocab_size=256, **options):
    torch.manual_seed(0)
    config = TransformerConfig(
        gate="g1", d_model=16, num_layers=2, num_heads=2, init=0.5, max_length=LENGTH, vocab_size=vocab_size, **options
    )
    return make_language_model(TransformerLM(config), name="m", derivatives=False, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def model():
    return model_with()


@pytest.fixture(scope="module")
def paired():
    """A model whose tokens are byte pairs."""
    pairs = trained_tokenizer([Document("string.py", SOURCE.encode())], 400).merges.to_str()
    return model_with(portable_tokenizer(pairs), 400)


def loss_after_a_line_break(model, tokens):
    """The loss of a text all of whose tokens are predicted, the first after a line break."""
    return text_loss(model, np.array([*model.encode(b"\n"), *tokens]), length=LENGTH)


class TestContinuations:
    @pytest.mark.parametrize(
        ("before", "after"), [(1, 1), (5, 7), (1, LENGTH), (60, 10), (3, 2 * LENGTH + 5), (60, 60)]
    )
    def test_have_the_likelihood_of_each_token_given_those_before_it_in_its_window(self, model, before, after):
        tokens = list(SOURCE[: before + after].encode())
        (found,) = continuations(model, [(tokens[:before], tokens[before:])], length=LENGTH)
        total = 0.0
        for start in range(before, before + after, LENGTH):
            end = min(start + LENGTH, before + after)
            first = max(0, end - 1 - LENGTH)
            for place in range(start, end):
                logits = model.module(torch.tensor([tokens[first:place]]))[0, -1]
                total += F.log_softmax(logits, dim=-1)[tokens[place]].item()
        assert_close(torch.tensor(found.log_likelihood), torch.tensor(total), dtype="float32")

    def test_do_not_depend_on_the_rest_of_the_batch(self, model):
        texts = [list(SOURCE[start : start + size].encode()) for start, size in ((0, 9), (40, 70), (7, 3), (90, 30))]
        requests = [(text[:2], text[2:]) for text in texts]
        alone = [continuations(model, [request], length=LENGTH)[0].log_likelihood for request in requests]
        together = [found.log_likelihood for found in continuations(model, requests, length=LENGTH, batch_size=3)]
        assert_close(torch.tensor(together), torch.tensor(alone), dtype="float32")

    def test_are_greedy_if_greedy_decoding_generates_them(self, model):
        prompt = list(b"import ")
        tokens = model.module.generate(torch.tensor([prompt]), max_new_tokens=6, temperature=0.0)[0, 7:].tolist()
        other = [*tokens[:-1], (tokens[-1] + 1) % 256]
        found = continuations(model, [(prompt, tokens), (prompt, other)], length=LENGTH)
        assert [one.is_greedy for one in found] == [True, False]


def write_tasks(folder, documents):
    """Write three tasks on the same documents: their likelihood, a multiple choice, and the rest of a line."""
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    common = (
        "dataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {data}}}}}\n"
        "test_split: test\nnum_fewshot: 0\nmetadata: {version: 1}\n"
    )
    tasks = {
        "rolling": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list:\n"
        "  - metric: word_perplexity\n  - metric: byte_perplexity\n  - metric: bits_per_byte\n",
        "choice": "output_type: multiple_choice\ndoc_to_text: '{{start}}'\ndoc_to_choice: '{{[end, wrong]}}'\n"
        "doc_to_target: 0\ntarget_delimiter: ''\nmetric_list:\n  - metric: acc\n",
        "line": "output_type: generate_until\ndoc_to_text: '{{start}}'\ndoc_to_target: '{{end}}'\n"
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 5}\nmetric_list:\n  - metric: exact_match\n',
    }
    for name, text in tasks.items():
        (folder / f"{name}.yaml").write_text(f"task: own_{name}\n{common}{text}")
    return data


@pytest.fixture(scope="module")
def documents():
    texts = [SOURCE[: 4 * LENGTH], SOURCE[100:117], SOURCE[300 : 300 + 3 * LENGTH + 11]]
    return [{"text": text, "start": text[:9], "end": text[9:14], "wrong": text[14:19]} for text in texts]


def evaluate_tasks(*args, **options):
    return importlib.import_module("tidegate.lab.models.evaluate").evaluate_tasks(*args, **options)


def generated(model, context, **options):
    from lm_eval.api.instance import Instance

    from tidegate.lab.models.evaluate import HarnessModel

    request = Instance(request_type="generate_until", doc={}, arguments=(context, options), idx=0)
    return HarnessModel(model).generate_until([request])[0]


# The harness takes seconds to import, and needs no network for these tasks.
@pytest.mark.full
class TestHarness:
    pytestmark = pytest.mark.filterwarnings("default")

    @pytest.mark.parametrize("kind", ["model", "paired"])
    def test_bits_per_byte_are_those_of_our_evaluation(self, kind, documents, tmp_path, request):
        model = request.getfixturevalue(kind)
        write_tasks(tmp_path, documents)
        found = evaluate_tasks(model, [str(tmp_path / "rolling.yaml")], batch_size=2)
        scores = {score.metric: score for score in found.scores}
        nats = num_bytes = 0
        for document in documents:
            tokens = model.encode(document["text"].encode())
            whole = len(tokens) // LENGTH * LENGTH
            # Whole windows by the loss of a text; the rest token by token in one window.
            if whole:
                own = loss_after_a_line_break(model, tokens[:whole])
                nats += own.loss * own.num_tokens
            if whole < len(tokens):
                inputs = [*model.encode(b"\n"), *tokens][:-1][-LENGTH:]
                logits = model.module(torch.tensor([inputs]))[0, whole - len(tokens) :]
                nats += F.cross_entropy(logits, torch.tensor(tokens[whole:]), reduction="sum").item()
            num_bytes += len(document["text"].encode())
        expected = nats / num_bytes / torch.log(torch.tensor(2.0)).item()
        assert_close(torch.tensor(scores["bits_per_byte"].value), torch.tensor(expected), dtype="float32")
        assert scores["bits_per_byte"].num_samples == len(documents)

    def test_a_folder_gives_all_of_its_tasks(self, model, documents, tmp_path):
        write_tasks(tmp_path, documents)
        found = evaluate_tasks(model, [str(tmp_path)], limit=2)
        assert {(score.task, score.metric) for score in found.scores} == {
            ("own_rolling", "word_perplexity"),
            ("own_rolling", "byte_perplexity"),
            ("own_rolling", "bits_per_byte"),
            ("own_choice", "acc"),
            ("own_line", "exact_match"),
        }
        assert {score.num_samples for score in found.scores} == {2}
        right = 0
        for document in documents[:2]:
            start, *ends = (model.encode(document[name].encode()) for name in ("start", "end", "wrong"))
            good, bad = continuations(model, [(start, end) for end in ends], length=LENGTH)
            right += good.log_likelihood > bad.log_likelihood
        assert next(score.value for score in found.scores if score.metric == "acc") == right / 2

    def test_nothing_is_printed_and_data_is_found_from_the_working_folder(
        self, model, documents, tmp_path, monkeypatch, capfd
    ):
        # The folder is in no repository: git would print an error.
        monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
        write_tasks(tmp_path, documents)
        (tmp_path / "tasks").mkdir()
        task = (tmp_path / "choice.yaml").read_text().replace(str(tmp_path / "documents.jsonl"), "documents.jsonl")
        (tmp_path / "tasks" / "own.yaml").write_text(task)
        monkeypatch.chdir(tmp_path)
        (score,) = evaluate_tasks(model, ["tasks/own.yaml"]).scores
        assert score.error is not None
        assert "fatal" not in capfd.readouterr().err

    @pytest.mark.parametrize("task", ["nothing/here.yaml", "no-such-task", "."])
    def test_an_unknown_task_is_named(self, model, task, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        with rejects("tasks", hint="lm-eval ls tasks") as error:
            evaluate_tasks(model, [task])
        assert str(error.value.got) == task

    def test_generation_stops_at_the_tasks_strings_and_context_is_cut_to_the_length(self, model):
        whole = generated(model, "import ", max_gen_toks=10)
        assert whole == b"".join(continue_text(model, b"import ", max_new_tokens=10, temperature=0.0)).decode(
            errors="replace"
        )
        stop = whole[2:4]
        assert generated(model, "import ", max_gen_toks=10, until=[stop]) == whole[: whole.index(stop)]
        assert generated(model, SOURCE[:500], max_gen_toks=4) == generated(model, SOURCE[480:500], max_gen_toks=4)
        assert generated(model, "", max_gen_toks=4) == generated(model, "\n", max_gen_toks=4)
        with rejects("max_gen_toks"):
            generated(model, "a", max_gen_toks=LENGTH)

    def test_a_temperature_samples_unless_the_task_sets_do_sample_to_false(self, model):
        greedy = generated(model, "import ", max_gen_toks=12)
        assert generated(model, "import ", max_gen_toks=12, temperature=5.0) != greedy
        assert generated(model, "import ", max_gen_toks=12, temperature=5.0, do_sample=False) == greedy
