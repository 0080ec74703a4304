"""Train a small Llama, observe its attention, add neutral gates, train only the gates, and observe it again.

`python examples/retrofit_llama.py [--steps 300] [--tuning-steps 100] [--seed 0]`
"""

import argparse

import torch
from corpus import HELD_OUT, MODULES, read
from transformers import LlamaConfig, LlamaForCausalLM

from tidegate.torch import observe
from tidegate.torch.retrofit import add_gates, freeze_all_but_gates, gate_optimizer_groups

BATCH, LENGTH = 16, 128
SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}


def train(model: LlamaForCausalLM, steps: int, generator: torch.Generator) -> None:
    text = torch.tensor(read(MODULES))
    optimizer = torch.optim.AdamW(gate_optimizer_groups(model, lr=3e-3))
    for step in range(steps):
        batch = text[torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator) + torch.arange(LENGTH)]
        optimizer.zero_grad()
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)


def look(model: LlamaForCausalLM, title: str) -> torch.Tensor:
    """Print attention statistics on modules outside the training text, and return the logits."""
    rows = torch.tensor(read(HELD_OUT))[: 16 * LENGTH].view(16, LENGTH)
    with torch.no_grad(), observe(model) as watcher:
        answer = model(rows, labels=rows)
    print(f"\n{title}: {answer.loss.item():.4f} nats per byte\n{watcher.observation().table()}\n", flush=True)
    return answer.logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tuning-steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    generator = torch.manual_seed(options.seed)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2))
    train(model, options.steps, generator)
    before = look(model, "without gates")
    print(add_gates(model, "g1"))
    assert torch.equal(look(model, "with neutral gates"), before)
    print(f"tuning {freeze_all_but_gates(model):,} of {model.num_parameters():,} parameters")
    train(model, options.tuning_steps, generator)
    look(model, "with tuned gates")


if __name__ == "__main__":
    main()
