"""Train a small byte-level language model on the sources of Python's standard library, in PyTorch.

`python examples/train_torch.py [--gate bma] [--steps 300] [--seed 0]`
"""

import argparse
import importlib.util
from pathlib import Path

import torch
from torch.nn import functional as F

from tidegate.torch import TransformerConfig, TransformerLM, gate_parameters

MODULES = (
    "argparse",
    "ast",
    "calendar",
    "configparser",
    "csv",
    "dataclasses",
    "datetime",
    "difflib",
    "doctest",
    "enum",
)
HELD_OUT = ("textwrap", "heapq")
BATCH, LENGTH = 16, 128


def read(modules: tuple[str, ...]) -> torch.Tensor:
    """The sources as one row of bytes."""
    sources = [Path(importlib.util.find_spec(name).origin).read_bytes() for name in modules]
    return torch.tensor(list(b"\n".join(sources)))


def batch(text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


def loss(model: TransformerLM, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gate", default="bma", help="any gate of the vocabulary, such as none, g1 or bma-query")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = TransformerLM(TransformerConfig(gate=options.gate, d_model=64, num_layers=2, num_heads=4))
    model.reset_parameters(seed=options.seed)
    gates = list(gate_parameters(model))
    others = [p for p in model.parameters() if all(p is not gate for gate in gates)]
    groups = [{"params": others, "weight_decay": 0.1}] + ([{"params": gates, "weight_decay": 0.0}] if gates else [])
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    text, generator = read(MODULES), torch.Generator().manual_seed(options.seed)
    for step in range(options.steps):
        optimizer.zero_grad()
        current = loss(model, batch(text, generator))
        current.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4}  loss {current.item():.3f}", flush=True)
    unseen = read(HELD_OUT)
    with torch.no_grad():
        losses = [loss(model, row[None]) for row in unseen.unfold(0, LENGTH + 1, LENGTH)]
    print(f"gate {options.gate}: {torch.stack(losses).mean().item():.4f} nats per byte on modules that it never saw")


if __name__ == "__main__":
    main()
