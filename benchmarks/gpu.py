"""Gated layers and decoders on a GPU, compared with their peers. This has not run on a GPU yet.

`make bench-gpu` runs the tests that need a GPU, then this script. It first compares values with the CPU, then times
layers and training steps in turns, and writes `gpu.json` and `gpu.md` to `benchmarks/results/`. Please send the table.
To try the script, run it with `--device cpu` and short lengths.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import Timing, as_json, interleave, machine_record, markdown_table, paired_ratio
from peers import D_MODEL, OURS, contenders, llama
from torch import Tensor, nn
from torch.nn import functional as F

from tidegate.config import TransformerConfig
from tidegate.lab.training.model import training_flops
from tidegate.lab.training.presets import SIZES
from tidegate.torch import TransformerLM

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LAYERS = (*OURS, "nn.MultiheadAttention", "x-transformers gated", "Qwen3-Next")
DECODERS = ("none", "g1", "bma", "sink")
VOCABULARY = 50_257
LLAMA = "transformers Llama"
RESULTS = Path(__file__).parent / "results"
CLOSENESS = {"atol": 1e-3, "rtol": 1e-3}
"""Tolerances for outputs and gradients in float32 on two devices, which add in different orders."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="device in PyTorch's notation (default cuda)")
    parser.add_argument("--rounds", type=int, default=20, help="interleaved rounds behind each median (default 20)")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=(512, 2048, 8192), help="sequence lengths T of layers"
    )
    parser.add_argument("--batch", type=int, default=8, help="batch size for layers (default 8)")
    parser.add_argument("--presets", nargs="*", default=("35m", "124m"), choices=list(SIZES), help="decoders to train")
    parser.add_argument("--rows", type=int, default=8, help="batch size for decoders (default 8)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for gpu.json and gpu.md")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SystemExit("PyTorch finds no GPU. Install its CUDA build, or try the script with --device cpu.")
    check_values(device)
    record = measure(device, options)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "gpu.json").write_text(json.dumps(record, default=as_json, indent=1))
    (options.out / "gpu.md").write_text(report(record))
    print(report(record))


def check_values(device: torch.device) -> None:
    """Check that every gate's output and gradient agree with the CPU in float32 before timing."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for name in OURS:
        torch.manual_seed(0)
        layer = contenders()[name]()
        x = torch.randn(2, 96, D_MODEL)
        expected, found = (_output_and_gradient(layer.to(place), x.to(place)) for place in ("cpu", device))
        for here, there in zip(expected, found, strict=True):
            torch.testing.assert_close(there.cpu(), here, **CLOSENESS)


def _output_and_gradient(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x)
    return y.detach(), torch.autograd.grad(y.square().mean(), x)[0]


def measure(device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the processor"
    packages = ("torch", "transformers", "x-transformers", "tidegate")
    record: dict[str, Any] = {"device": name, "surroundings": machine_record(packages), "rounds": options.rounds}
    record |= {"layers": {}, "decoders": {}}
    for precision, dtype in DTYPES.items():
        for length in options.lengths:
            print(f"layers in {precision}, T = {length}", flush=True)
            x = torch.randn(options.batch, length, D_MODEL, device=device, dtype=dtype, requires_grad=True)
            record["layers"][f"{precision}, T = {length}"] = measure_layers(x, rounds=options.rounds)
    for preset in options.presets:
        print(f"training steps of {preset}", flush=True)
        record["decoders"][preset] = measure_decoders(preset, device, rows=options.rows, rounds=options.rounds)
    return record


def measure_layers(x: Tensor, *, rounds: int) -> dict[str, Any]:
    """Measure the times of forward and backward passes of all layers in turns, and their peak memory."""
    build = contenders()
    layers = {name: build[name]().to(x.device, x.dtype) for name in LAYERS}
    works = {name: partial(_train_layer, layer, x) for name, layer in layers.items()}
    timings = interleave({name: _waiting(work, x.device) for name, work in works.items()}, rounds=rounds, warmups=3)
    return {"timings": timings, "peaks": {name: peak_bytes(work, x.device) for name, work in works.items()}}


def _train_layer(layer: nn.Module, x: Tensor) -> None:
    layer.zero_grad()
    x.grad = None
    layer(x).sum().backward()


def measure_decoders(preset: str, device: torch.device, *, rows: int, rounds: int) -> dict[str, Any]:
    """Measure times of training steps under bfloat16 autocast, as in `tidegate train --precision bf16`, in turns."""
    size = SIZES[preset]
    configs = {
        gate: TransformerConfig(
            gate=gate,
            d_model=size.d_model,
            num_layers=size.num_layers,
            num_heads=size.num_heads,
            vocab_size=VOCABULARY,
            max_length=size.length,
        )
        for gate in DECODERS
    }
    ours = {gate: TransformerLM(config) for gate, config in configs.items()}
    flops = training_flops(ours["none"])
    models: dict[str, nn.Module] = {**ours, LLAMA: llama(configs["none"])}
    tokens = torch.randint(VOCABULARY, (rows, size.length + 1), device=device)
    works = {name: _update_of(model.to(device), tokens) for name, model in models.items()}
    timings = interleave({name: _waiting(work, device) for name, work in works.items()}, rounds=rounds, warmups=3)
    peaks = {name: peak_bytes(work, device) for name, work in works.items()}
    return {"timings": timings, "peaks": peaks, "tokens": rows * size.length, "flops_per_token": flops}


def _update_of(model: nn.Module, tokens: Tensor) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update() -> None:
        optimizer.zero_grad()
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            made = model(tokens[:, :-1])
            logits = made if isinstance(made, Tensor) else made.logits
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return update


def _waiting(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Return the same work, followed by a wait for the device."""

    def done() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return done


def peak_bytes(work: Callable[[], None], device: torch.device) -> int | None:
    """Return the peak memory of the work above the memory in use before; None except on CUDA devices."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    resting = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - resting


def report(record: dict[str, Any]) -> str:
    """Return tables of times relative to `none`, or to the Llama, in the same rounds."""
    parts = [f"# On {record['device']}\n", "## Forward and backward pass of a layer: time (peak memory) over `none`\n"]
    rows = [[name, *(_cell(own, name, "none") for own in record["layers"].values())] for name in LAYERS]
    parts.append(markdown_table(["layer", *record["layers"]], rows) + "\n")
    for preset, own in record["decoders"].items():
        parts.append(f"## Training steps of `{preset}` in bfloat16: time (peak memory) over a Llama of its size\n")
        rows = [[name, _cell(own, name, LLAMA), *_rates(own, name)] for name in own["timings"]]
        parts.append(markdown_table(["model", "over the Llama", "tokens/s", "TFLOP/s of `none`"], rows) + "\n")
    parts.append(f"Medians of {record['rounds']} interleaved rounds. {json.dumps(record['surroundings'])}\n")
    return "\n".join(parts)


def _cell(own: dict[str, Any], name: str, over: str) -> str:
    timings, peaks = own["timings"], own["peaks"]
    memory = "" if peaks[name] is None or not peaks[over] else f" ({peaks[name] / peaks[over]:.2f})"
    return f"{paired_ratio(timings, name, over):.3f}{memory}"


def _rates(own: dict[str, Any], name: str) -> tuple[str, str]:
    timing: Timing = own["timings"][name]
    speed = own["tokens"] / timing.median
    return f"{speed:,.0f}", f"{speed * own['flops_per_token'] / 1e12:.1f}" if name == "none" else ""


if __name__ == "__main__":
    main()
