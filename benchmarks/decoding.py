"""Greedy generation: our decoder with each gate, compared with a Llama of the same size in transformers.

`python benchmarks/decoding.py` checks that both models have the same size and that each generated token of ours has the
highest logit in one pass over the whole text. It times whole calls of `generate` in turns, with one thread and with
two, and writes `decoding.json` and `decoding.md` to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from harness import interleave, machine_record, markdown_table, marks_table, paired_ratio
from peers import OURS, llama
from torch import Tensor

from tidegate.config import TransformerConfig
from tidegate.torch import TransformerLM

RESULTS = Path(__file__).parent / "results"
PEER = "transformers Llama"
NUM_NEW = 64


class Request(NamedTuple):
    """The batch size and the prompt length of a call."""

    batch: int
    prompt: int

    def __str__(self) -> str:
        return f"batch {self.batch} after {self.prompt} tokens"


REQUESTS = (Request(1, 64), Request(8, 64), Request(1, 1024))


def contenders(request: Request, vocab_size: int) -> dict[str, Callable[[], Any]]:
    """Return functions that generate greedily, with each gate and with the Llama."""
    torch.manual_seed(0)
    prompt = torch.randint(vocab_size, (request.batch, request.prompt))
    models = {gate: TransformerLM(config_of(gate, vocab_size)).eval() for gate in OURS}
    peer = llama(models["none"].config).eval()
    assert sum(p.numel() for p in peer.parameters()) == models["none"].num_parameters()

    def ours(model: TransformerLM) -> Callable[[], Any]:
        return lambda: model.generate(prompt, max_new_tokens=NUM_NEW, temperature=0)

    def theirs() -> Any:
        return peer.generate(prompt, max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False, pad_token_id=0)

    assert theirs().shape == ours(models["none"])().shape
    for model in models.values():
        require_likeliest(model, ours(model)())
    return {gate: ours(model) for gate, model in models.items()} | {PEER: theirs}


@torch.no_grad()
def require_likeliest(model: TransformerLM, tokens: Tensor) -> None:
    """Check that each generated token has the highest logit after those before it, up to rounding."""
    logits = model(tokens[:, :-1], num_logits=NUM_NEW)
    taken = logits.gather(-1, tokens[:, -NUM_NEW:, None])[..., 0]
    torch.testing.assert_close(taken, logits.amax(dim=-1), rtol=1e-4, atol=1e-4)


def config_of(gate: str, vocab_size: int) -> TransformerConfig:
    return TransformerConfig(vocab_size=vocab_size, d_model=512, num_layers=6, num_heads=8, max_length=2048, gate=gate)


def measure(threads: list[int], requests: list[Request], vocab_size: int, rounds: int) -> dict[str, Any]:
    packages = ("torch", "transformers", "tidegate")
    record: dict[str, Any] = {"surroundings": machine_record(packages), "rounds": rounds, "vocabulary": vocab_size}
    record |= {"marks": [], "milliseconds": {}}
    for num_threads in threads:
        torch.set_num_threads(num_threads)
        for request in requests:
            where = f"{request}, {num_threads} thread{'s' * (num_threads > 1)}"
            print(where, flush=True)
            runs = contenders(request, vocab_size)
            theirs = runs.pop(PEER)
            record["milliseconds"][where] = cells = {}
            for gate, ours in runs.items():
                # Back to back, because the load of a machine changes from second to second.
                timings = interleave({gate: ours, PEER: theirs}, rounds=rounds)
                cells[gate] = tuple(1e3 * timings[name].median / NUM_NEW for name in (gate, PEER))
                mark = "≤ 0.85" if gate == "none" else "≤ 1.0"
                record["marks"].append((f"{gate}, {where}", paired_ratio(timings, gate, PEER), mark))
    return record


def report(record: dict[str, Any]) -> str:
    title = (
        f"# Generating {NUM_NEW} tokens, 6 layers, d = 512, {record['vocabulary']} tokens in the vocabulary, float32\n"
    )
    columns = record["milliseconds"].values()
    rows = [
        [gate, *(f"{ours:.2f} ms, {theirs:.2f} ms" for ours, theirs in (cells[gate] for cells in columns))]
        for gate in OURS
    ]
    table = markdown_table(["a token with, and with the Llama", *record["milliseconds"]], rows)
    around = json.dumps(record["surroundings"])
    closing = f"Medians of {record['rounds']} back-to-back pairs; marks are ratios to the Llama. {around}\n"
    return "\n".join((title, table + "\n", marks_table(record["marks"]) + "\n", closing))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="pairs behind each median (default 5)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads (default 1 2)")
    parser.add_argument("--vocabulary", type=int, default=4096, help="tokens of the vocabulary (default 4096)")
    parser.add_argument("--batch", type=int, nargs="+", help="only requests of these batches (default all)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for decoding.json and decoding.md")
    options = parser.parse_args()
    requests = [request for request in REQUESTS if options.batch is None or request.batch in options.batch]
    record = measure(options.threads, requests, options.vocabulary, options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "decoding.json").write_text(json.dumps(record, indent=1))
    (options.out / "decoding.md").write_text(report(record))
    print(report(record))


if __name__ == "__main__":
    main()
