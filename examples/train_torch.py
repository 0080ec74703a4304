"""Train a small byte-level language model on the sources of Python's standard library, in PyTorch.

`python examples/train_torch.py [--gate bma] [--steps 300] [--seed 0]`
"""

import argparse

import torch
from corpus import HELD_OUT, MODULES, read
from torch.nn import functional as F

from tidegate.torch import TransformerConfig, TransformerLM, gate_parameters

BATCH, LENGTH = 16, 128


def batch(text: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(LENGTH + 1)]


def loss(model: TransformerLM, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gate", default="bma", help="gates, such as none, g1 or bma-query (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps must be at least 1; got {options.steps}.")
    try:
        config = TransformerConfig(gate=options.gate, d_model=64, num_layers=2, num_heads=4)
    except ValueError as error:
        parser.error(f"--gate: {error}")
    model = TransformerLM(config)
    model.reset_parameters(seed=options.seed)
    gates = list(gate_parameters(model))
    others = [p for p in model.parameters() if all(p is not gate for gate in gates)]
    groups = [{"params": others, "weight_decay": 0.1}] + ([{"params": gates, "weight_decay": 0.0}] if gates else [])
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    text, generator = torch.tensor(read(MODULES)), torch.Generator().manual_seed(options.seed)
    for step in range(options.steps):
        optimizer.zero_grad()
        current = loss(model, batch(text, generator))
        current.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4}  loss {current.item():.3f}", flush=True)
    unseen = torch.tensor(read(HELD_OUT))
    with torch.no_grad():
        losses = [loss(model, row[None]) for row in unseen.unfold(0, LENGTH + 1, LENGTH)]
    print(f"gate {options.gate}: {torch.stack(losses).mean().item():.4f} nats per byte on unseen modules")


if __name__ == "__main__":
    main()
