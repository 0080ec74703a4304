"""The cost of gates in JAX: our layers, `nnx.MultiHeadAttention` and a plain einsum implementation, jitted, in one run.

`python benchmarks/jax_layers.py` checks values first, then times forward and gradient, and writes `jax_layers.json` and
`jax_layers.md` to `benchmarks/results/`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from harness import as_json, interleave, machine_record, markdown_table, marks_table, paired_ratio, ratio_in_turns
from jax import Array

from tidegate.flax import AttentionConfig, gated_attention, init_attention
from tidegate.gate import PRESETS

D_MODEL, NUM_HEADS = 512, 8
OURS = ("none", *PRESETS)
LENGTHS = (128, 512, 2048)
WINDOW, WINDOW_LENGTH = 128, 4096
RESULTS = Path(__file__).parent / "results"


def plain_einsum(params: dict[str, Any], x: Array) -> Array:
    """Return ungated causal attention by the textbook formula, with the parameters of our `none`."""
    q, k, v = (jnp.einsum("btm,mhd->bthd", x, params[f"{name}_proj"]["kernel"]) for name in "qkv")
    scores = jnp.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    behind = jnp.tril(jnp.ones(scores.shape[-2:], dtype=bool))
    weights = jax.nn.softmax(jnp.where(behind, scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhts,bshd,hdm->btm", weights, v, params["o_proj"]["kernel"])


def contenders() -> dict[str, tuple[Any, Callable[[Any, Array], Array]]]:
    """Return the parameters of each layer, and a function of them and of the input."""
    layers: dict[str, tuple[Any, Callable[[Any, Array], Array]]] = {}
    for name in OURS:
        config = AttentionConfig(d_model=D_MODEL, num_heads=NUM_HEADS, gate=name)
        params = init_attention(jax.random.key(0), config)
        layers[name] = params, lambda params, x, config=config: gated_attention(params, x, config)
    layers["plain einsum"] = layers["none"][0], plain_einsum
    peer = nnx.MultiHeadAttention(NUM_HEADS, D_MODEL, use_bias=False, decode=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(peer)
    layers["nnx.MultiHeadAttention"] = state, lambda state, x: nnx.merge(graph, state)(x, is_causal=True)
    return layers


def check_values() -> None:
    """Check that the plain implementation and ours agree on the same weights before timing."""
    layers, x = contenders(), jax.random.normal(jax.random.key(1), (1, 256, D_MODEL))
    ours, plain = (layers[name][1](layers[name][0], x) for name in ("none", "plain einsum"))
    assert jnp.max(jnp.abs(ours - plain)) < 2e-5


def measure(lengths: list[int], rounds: int) -> dict[str, Any]:
    record: dict[str, Any] = {"surroundings": machine_record(("jax", "jaxlib", "flax", "tidegate")), "rounds": rounds}
    record |= {"lengths": list(lengths), "forward": {}, "gradient": {}, "marks": []}
    layers = contenders()
    for length in lengths:
        x = jax.random.normal(jax.random.key(2), (1, length, D_MODEL))
        for work in ("forward", "gradient"):
            print(f"T = {length}: {work}", flush=True)
            runs = {name: compiled(work, apply, params, x) for name, (params, apply) in layers.items()}
            record[work][length] = interleave(runs, rounds=rounds)
            record["marks"] += _marks(work, length, runs, pairs=3 * rounds * max(1, 1024 // length))
    for work in ("forward", "gradient"):
        print(f"T = {WINDOW_LENGTH}: {work}, window and sink", flush=True)
        record["marks"] += _marks_of_long_rows(work, pairs=rounds)
    return record


def compiled(work: str, apply: Callable[[Any, Array], Array], params: Any, x: Array) -> Callable[[], Any]:
    function = jax.jit(apply if work == "forward" else jax.grad(lambda params, x: apply(params, x).sum(), (0, 1)))
    return lambda: jax.block_until_ready(function(params, x))


def report(record: dict[str, Any]) -> str:
    parts = [f"# JAX layers, d = {D_MODEL}, {NUM_HEADS} heads, one sequence, float32, jitted\n"]
    for work in ("forward", "gradient"):
        rows = []
        for name in record[work][record["lengths"][0]]:
            timings = [record[work][length] for length in record["lengths"]]
            cells = [f"{paired_ratio(t, name, 'none'):.3f} ({1e3 * t[name].median:.2f} ms)" for t in timings]
            rows.append([name, *cells])
        header = ["layer", *(f"T = {length}" for length in record["lengths"])]
        parts.append(f"## {work.capitalize()}: time over `none` (median)\n\n{markdown_table(header, rows)}\n")
    parts.append(f"{marks_table(record['marks'])}\n")
    rounds, around = record["rounds"], json.dumps(record["surroundings"])
    parts.append(f"Tables: medians of {rounds} interleaved rounds; marks: of back-to-back pairs. {around}\n")
    return "\n".join(parts)


def _marks(
    work: str, length: int, runs: dict[str, Callable[[], Any]], *, pairs: int
) -> Iterator[tuple[str, float, str]]:
    """Yield figures with their measured values and marks."""
    where = f"{work}, T = {length}"
    if length == 2048:
        for name in ("bma", "bma-query"):
            yield f"{name}, {where}", ratio_in_turns(runs[name], runs["none"], rounds=pairs), "≤ 1.08"
    if length >= 512:
        yield f"sink, {where}", ratio_in_turns(runs["sink"], runs["none"], rounds=pairs), "≤ 1.05"
    ratio = ratio_in_turns(runs["none"], runs["plain einsum"], rounds=pairs)
    yield f"none over plain einsum, {where}", ratio, "≤ 1"


def _marks_of_long_rows(work: str, *, pairs: int) -> Iterator[tuple[str, float, str]]:
    """Yield the times of a window and of a sink on long rows, relative to full causal attention without gates."""
    x = jax.random.normal(jax.random.key(2), (1, WINDOW_LENGTH, D_MODEL))
    runs: dict[str, Callable[[], Any]] = {}
    for name, options in {"none": {}, "window": {"window": WINDOW}, "sink": {"gate": "sink"}}.items():
        config = AttentionConfig(d_model=D_MODEL, num_heads=NUM_HEADS, **options)
        params = init_attention(jax.random.key(0), config)
        runs[name] = compiled(work, lambda params, x, config=config: gated_attention(params, x, config), params, x)
    where = f"{work}, T = {WINDOW_LENGTH}"
    windowed, sunk = (ratio_in_turns(runs[name], runs["none"], rounds=pairs) for name in ("window", "sink"))
    yield f"window of {WINDOW} over full causal, {where}", windowed, "≤ 0.6"
    yield f"sink, {where}", sunk, "≤ 1.05"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds behind each median (default 9)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="sequence lengths T")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for jax_layers.json and jax_layers.md")
    options = parser.parse_args()
    check_values()
    record = measure(options.lengths, options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "jax_layers.json").write_text(json.dumps(record, default=as_json, indent=1))
    (options.out / "jax_layers.md").write_text(report(record))
    print(report(record))


if __name__ == "__main__":
    main()
