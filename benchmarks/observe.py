"""The cost of observing: statistics of one attention call, and of whole models compared with `output_attentions=True`.

The models are a Llama with fused attention, and three that compute the matrix of weights themselves: GPT-OSS with
sinks, Gemma 2 with soft caps, and BLOOM, which calls no attention function.

`python benchmarks/observe.py` checks values first, then measures time in turns and peak memory in fresh processes, and
writes `observe.json` and `observe.md` to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import torch
from harness import (
    as_json,
    in_fresh_process,
    interleave,
    machine_record,
    markdown_table,
    marks_table,
    paired_ratio,
    peak_above_rest,
    resident_bytes,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from tidegate.torch import attention_statistics
from tidegate.torch.observing import Observation, observe

Mark: TypeAlias = tuple[str, float, str]
"""A figure, its measured value, and its mark."""

D_MODEL, NUM_HEADS = 512, 8
LENGTH, LONG = 4096, 32_768
LLAMA_LENGTHS = (1024, 2048, 4096, 8192)
EAGER_LENGTHS = (1024, 2048)
RESULTS = Path(__file__).parent / "results"
GIB, MIB = 2**30, 2**20
THIRTIETH = f"≤ {1 / 30:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="interleaved rounds behind each median (default 7)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LLAMA_LENGTHS, help="sequence lengths of the Llama")
    parser.add_argument("--threads", type=int, help="threads of PyTorch; use 1 on a machine with other load")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for observe.json and observe.md")
    parser.add_argument("--peak-of", nargs=2, metavar=("NAME", "T"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.peak_of:
        name, length = options.peak_of
        print(json.dumps(peak_memory(name, int(length))))
        return
    check_values()
    record = measure(sorted(options.lengths), options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "observe.json").write_text(json.dumps(record, default=as_json, indent=1))
    (options.out / "observe.md").write_text(report(record))
    print(report(record))


class Attention(nn.Module):
    """One fused attention call."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def heads(length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, NUM_HEADS, length, D_MODEL // NUM_HEADS)
    q, k, v = (torch.randn(shape, generator=generator) for _ in range(3))
    return q, k, v


def plain_sink_and_entropy(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return sink mass and entropy, computed from the whole matrix of weights."""
    length = q.shape[-2]
    scores = q @ k.mT * q.shape[-1] ** -0.5
    scores.masked_fill_(torch.ones(length, length, dtype=torch.bool).triu(1), float("-inf"))
    weights = scores.softmax(dim=-1)
    return weights[..., 0], torch.special.entr(weights).sum(dim=-1)


def one_call(length: int) -> dict[str, Callable[[], Any]]:
    """Return one attention call, its statistics, the call under `observe`, and the plain computation of statistics."""
    q, k, v = heads(length)
    layer = Attention()

    def observed() -> Observation:
        with observe(layer, residual=False) as watcher:
            layer(q, k, v)
        return watcher.observation()

    return {
        "attention": lambda: layer(q, k, v),
        "statistics": lambda: attention_statistics(q, k, v, causal=True),
        "observed": observed,
        "score matrix": lambda: plain_sink_and_entropy(q, k),
    }


def llama(implementation: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=max(LLAMA_LENGTHS),
        use_cache=False,
        attn_implementation=implementation,
    )
    return LlamaForCausalLM(config).eval()


def tokens(length: int) -> Tensor:
    return torch.randint(256, (1, length), generator=torch.Generator().manual_seed(0))


def gpt_oss() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_local_experts": 2, "num_experts_per_tok": 1}
    return GptOssForCausalLM(GptOssConfig(**sizes, **heads, use_cache=False)).eval()


def gemma2() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "attn_implementation": "eager"}
    return Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, use_cache=False)).eval()


def bloom() -> PreTrainedModel:
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=256, hidden_size=256, n_layer=2, n_head=4, use_cache=False)
    return BloomForCausalLM(config).eval()


EAGER = {"GPT-OSS": gpt_oss, "Gemma 2": gemma2, "BLOOM": bloom}


def forward_alone(model: PreTrainedModel, length: int) -> Callable[[], Any]:
    inputs = tokens(length)
    return lambda: model(inputs)


def observed(model: PreTrainedModel, length: int) -> Callable[[], Observation]:
    inputs = tokens(length)

    def run() -> Observation:
        with observe(model, residual=False) as watcher:
            model(inputs)
        return watcher.observation()

    return run


def from_weights(model: PreTrainedModel, length: int) -> Callable[[], list[dict[str, Tensor]]]:
    """Compute the same statistics from the weights, for each layer, by head and position, and averaged."""
    inputs = tokens(length)

    def run() -> list[dict[str, Tensor]]:
        found = []
        for weights in model(inputs, output_attentions=True).attentions:
            entropy = torch.special.entr(weights).sum(dim=-1)
            if (sink := 1 - weights.sum(dim=-1)).max() > 1e-3:
                entropy += torch.special.entr(sink)
            by_position = {"mass": weights[..., 0], "entropy": entropy, "effective_keys": entropy.exp()}
            found.append({name: values.mean(dim=0) for name, values in by_position.items()})
            # The first query sees only itself, and is left out of means.
            found[-1] |= {f"{name}, mean": values[..., 1:].mean(dim=(0, 2)) for name, values in by_position.items()}
        return found

    return run


WAYS = {"observe": observed, "output_attentions": from_weights, "forward alone": forward_alone}
"""Ways to run a model."""


def way(model: str, name: str, length: int) -> Callable[[], Any]:
    """Return one of the ways with a new model; the Llama computes the weights only for `output_attentions`."""
    if model == "Llama":
        return WAYS[name](llama("eager" if name == "output_attentions" else "sdpa"), length)
    return WAYS[name](EAGER[model](), length)


@torch.no_grad()
def check_values() -> None:
    """Check that all ways agree before timing."""
    calls = one_call(256)
    mass, entropy = calls["score matrix"]()
    statistics = calls["statistics"]()
    torch.testing.assert_close(statistics.mass, mass, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(statistics.entropy, entropy, atol=1e-4, rtol=1e-4)
    for model in ("Llama", *EAGER):
        seen, expected = way(model, "observe", 256)(), way(model, "output_attentions", 256)()
        for layer, weights in zip(seen.layers, expected, strict=True):
            for name in ("mass", "entropy", "effective_keys"):
                found = torch.tensor([moments.mean for moments in layer.heads[name]])
                torch.testing.assert_close(found, weights[f"{name}, mean"], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def measure(lengths: list[int], rounds: int) -> dict[str, Any]:
    packages = ("torch", "transformers", "tidegate")
    record: dict[str, Any] = {"surroundings": machine_record(packages), "rounds": rounds, "lengths": lengths}
    print(f"one attention call, T = {LENGTH}", flush=True)
    calls = one_call(LENGTH)
    record["call"] = interleave({name: calls[name] for name in ("attention", "statistics", "observed")}, rounds=rounds)
    record["call_peak"] = {name: in_fresh_process(__file__, "--peak-of", name, str(LENGTH))["above"] for name in calls}
    print(f"one attention call, T = {LONG}, memory", flush=True)
    record["long_peak"] = in_fresh_process(__file__, "--peak-of", "observed", str(LONG))["whole"]
    record["llama"], record["llama_peak"] = measure_model("Llama", lengths, rounds)
    record["eager"] = {model: measure_model(model, list(EAGER_LENGTHS), rounds) for model in EAGER}
    record["marks"] = list(marks(record))
    return record


def measure_model(model: str, lengths: list[int], rounds: int) -> tuple[dict[int, Any], dict[int, dict[str, int]]]:
    """Measure the time, in turns, and the peak memory of each way by length."""
    times, peaks = {}, {}
    for length in lengths:
        print(f"{model}, T = {length}", flush=True)
        times[length] = interleave({name: way(model, name, length) for name in WAYS}, rounds=rounds)
        peaks[length] = {
            name: in_fresh_process(__file__, "--peak-of", f"{model}/{name}", str(length))["above"] for name in WAYS
        }
    return times, peaks


@torch.no_grad()
def peak_memory(name: str, length: int) -> dict[str, int]:
    """Return the peak memory above the memory in use before the work, and that of the whole process."""
    model, _, kind = name.partition("/")
    # A short pass first, so that one-time allocations of libraries do not count.
    (way(model, kind, 16) if kind else one_call(16)[name])()
    work = way(model, kind, length) if kind else one_call(length)[name]
    return {"above": peak_above_rest(work), "whole": resident_bytes("VmHWM")}


def marks(record: dict[str, Any]) -> Iterator[Mark]:
    call, peak = record["call"], record["call_peak"]
    where = f"T = {LENGTH}"
    yield f"statistics over one attention forward, {where}", paired_ratio(call, "statistics", "attention"), "≤ 1.3"
    extra = paired_ratio(call, "observed", "attention") - 1
    yield f"what observe adds, over one attention forward, {where}", extra, "≤ 1.3"
    plain = peak["score matrix"]
    yield f"peak memory of statistics over the score matrix's, {where}", peak["statistics"] / plain, THIRTIETH
    added = peak["observed"] - peak["attention"]
    yield f"peak memory that observe adds over the score matrix's, {where}", added / plain, THIRTIETH
    yield f"GiB of the whole process at its peak, T = {LONG}", record["long_peak"] / GIB, "≤ 1.5"
    for model, (_, peaks) in record["eager"].items():
        peak, length = peaks[EAGER_LENGTHS[-1]], EAGER_LENGTHS[-1]
        ratio = peak["observe"] / peak["forward alone"]
        yield f"peak memory of observe over the forward pass alone, {model}, T = {length}", ratio, "≤ 1.1"
    ratios = ratios_by_length(record["llama"])
    if 2048 in ratios:
        yield "output_attentions over observe, time, T = 2048", ratios[2048], "≥ 1.3"
    for shorter, longer in pairwise(record["lengths"]):
        grown = ratios[longer] / ratios[shorter]
        yield f"that ratio at T = {longer} over the one at T = {shorter}", grown, "≥ 1"
    first, last = record["lengths"][0], record["lengths"][-1]
    if last > first:
        for name, mark in (("observe", "≤ 1.2"), ("output_attentions", "≥ 1.8")):
            yield (
                f"power of T by which peak memory grows, {name}",
                _power(record["llama_peak"], name, first, last),
                mark,
            )


def ratios_by_length(times: dict[int, Any]) -> dict[int, float]:
    return {length: paired_ratio(timings, "output_attentions", "observe") for length, timings in times.items()}


def _power(peaks: dict[int, dict[str, int]], name: str, first: int, last: int) -> float:
    return math.log(peaks[last][name] / peaks[first][name]) / math.log(last / first)


def report(record: dict[str, Any]) -> str:
    call, peak = record["call"], record["call_peak"]
    rows = [
        [
            name,
            f"{1e3 * call[name].median:.1f} ms" if name in call else "",
            f"{paired_ratio(call, name, 'attention'):.2f}" if name in call else "",
            f"{peak[name] / MIB:,.0f} MiB",
        ]
        for name in peak
    ]
    ways = [*WAYS, "output_attentions over observe", *(f"peak, {name}" for name in WAYS)]
    eager = [[model, *row] for model, (times, peaks) in record["eager"].items() for row in rows_by_length(times, peaks)]
    parts = [
        f"# Observing, d = {D_MODEL}, {NUM_HEADS} heads, one sequence, float32\n",
        f"## One attention call, T = {LENGTH}\n",
        markdown_table(["", "time", "over attention", "peak memory"], rows) + "\n",
        "## A Llama of two layers, d = 256, 4 heads\n",
        markdown_table(["T", *ways], rows_by_length(record["llama"], record["llama_peak"])) + "\n",
        "## Models of two layers, d = 256, 4 heads, that make the weights themselves\n",
        markdown_table(["", "T", *ways], eager) + "\n",
        marks_table(record["marks"]) + "\n",
        f"Medians of {record['rounds']} interleaved rounds. {json.dumps(record['surroundings'])}\n",
    ]
    return "\n".join(parts)


def rows_by_length(times: dict[int, Any], peaks: dict[int, dict[str, int]]) -> list[list[str]]:
    ratios = ratios_by_length(times)
    return [
        [
            str(length),
            *(f"{1e3 * timings[name].median:,.0f} ms" for name in WAYS),
            f"{ratios[length]:.2f}",
            *(f"{peaks[length][name] / MIB:,.0f} MiB" for name in WAYS),
        ]
        for length, timings in times.items()
    ]


if __name__ == "__main__":
    main()
