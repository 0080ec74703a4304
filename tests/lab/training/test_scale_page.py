"""The numbers of docs/scale.md that are computed are what the functions and the record give."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tidegate.config import TransformerConfig
from tidegate.lab.compare.design import single_run
from tidegate.lab.compare.variants import parse_variant
from tidegate.lab.training.estimate import training_hours
from tidegate.lab.training.model import build_model, training_flops
from tidegate.lab.training.presets import SIZES, token_budget
from tidegate.lab.training.records import Record, RecordFile

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "scale.md").read_text()
PLACES = {"one A100": (3.12e14, 0.4), "one H100": (9.89e14, 0.4), "eight H100": (7.912e15, 0.35)}


def test_a_run_of_train_is_the_one_that_a_comparison_trains():
    lines = RecordFile(ROOT / "docs" / "records" / "compare" / "default" / "records.jsonl").read()
    compared = next(line for line in lines if isinstance(line, Record))
    # tidegate train --gate none --tokens 1638400
    run = single_run(parse_variant("none"), SIZES["tiny"], budget=1_638_400)
    # The text is the standard library of the Python that runs this, and differs between its releases.
    run = replace(run, task=replace(run.task, fingerprint=compared.run.task.fingerprint))
    assert run.id == compared.id == "9c4a31369b1ba583"


def test_the_training_speeds_are_those_on_record():
    for found in json.loads((ROOT / "benchmarks" / "records" / "training.json").read_text())["presets"].values():
        for name, row in found["rows"].items():
            what = f"`{name}`" if "Llama" not in name else "plain loop, transformers' Llama"
            assert (
                f"| {what} | {row['tokens_per_second']:,.0f} | {row['ratio']:.2f} | {row['peak_ratio']:.2f} |" in PAGE
            )


@pytest.mark.parametrize("preset", ["35m", "124m", "1.3b"])
def test_the_estimates_are_those_of_the_functions(preset):
    size = SIZES[preset]
    with torch.device("meta"):
        model = build_model(
            TransformerConfig(
                gate="none",
                d_model=size.d_model,
                num_layers=size.num_layers,
                num_heads=size.num_heads,
                vocab_size=int(size.tokenizer.removeprefix("bpe:")),
                max_length=size.length,
            )
        )
    count, update = model.num_parameters(), size.batch_size * size.length
    tokens = round(token_budget(count) / update) * update
    flops = training_flops(model) * tokens
    hours = [f"{training_hours(flops, flops=peak, mfu=share):.3g} h" for peak, share in PLACES.values()]
    figures = [f"{count / 1e6:.1f} M", f"{tokens / 1e9:.2f} G", f"{flops:.3g}".replace("e+", "e")]
    assert "| " + " | ".join([f"`{preset}`", *figures, *hours]) + " |" in PAGE
