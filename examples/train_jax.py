"""Train the model of `train_torch.py` on the same text, in JAX with optax.

`python examples/train_jax.py [--gate bma] [--steps 300] [--seed 0]`
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from corpus import HELD_OUT, MODULES, read

from tidegate.flax import TransformerConfig, apply_model, init_model

BATCH, LENGTH = 16, 128


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
    params = init_model(jax.random.key(options.seed), config)
    decayed = jax.tree.map_with_path(lambda path, _: "attn_gate" not in jax.tree_util.keystr(path), params)
    optimizer = optax.adamw(3e-3, b2=0.95, weight_decay=0.1, mask=decayed)

    @jax.jit
    def loss(params, tokens):
        logits = apply_model(params, tokens[:, :-1], config)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit
    def update(params, state, key, text):
        starts = jax.random.randint(key, (BATCH, 1), 0, len(text) - LENGTH)
        current, gradients = jax.value_and_grad(loss)(params, text[starts + jnp.arange(LENGTH + 1)])
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, current

    text, state = jnp.asarray(read(MODULES)), optimizer.init(params)
    for step, key in enumerate(jax.random.split(jax.random.key(options.seed + 1), options.steps)):
        params, state, current = update(params, state, key, text)
        if step % 50 == 0:
            print(f"step {step:4}  loss {current:.3f}", flush=True)
    unseen = jnp.asarray(read(HELD_OUT))
    starts = jnp.arange(0, len(unseen) - LENGTH, LENGTH)
    losses = loss(params, unseen[starts[:, None] + jnp.arange(LENGTH + 1)])
    print(f"gate {options.gate}: {losses:.4f} nats per byte on unseen modules")


if __name__ == "__main__":
    main()
