"""A short tour: the gate vocabulary, attention as tensor calculus, gradients by hand, and pictures in tour/."""

from pathlib import Path

import numpy as np

from tidegate import PRESETS, Gates
from tidegate.tensors import (
    AttentionArrays,
    attention_weights,
    bilinearly_modulated_attention,
    causal_mask,
    decompose_attention,
    init_gate_parameters,
    init_multihead_weights,
    naive_query_modulated_attention,
    retrieval_success,
    verify_layer_gradients,
)
from tidegate.tensors.plots import plot_attention_weights, plot_retrieval_success, plot_temperature_sweep

rng = np.random.default_rng(0)

print("The named gates, and their parameters in a layer with d = 512 and 8 heads:")
for name, gate in PRESETS.items():
    print(f"  {name:10} {gate.spelling:20} {gate.num_parameters(d_model=512, num_heads=8):>8,} parameters")

Q, K, V = rng.standard_normal((3, 6, 4))
W_g = rng.standard_normal((4, 4))
source, query = (bilinearly_modulated_attention(Q, K, V, W_g, index=index) for index in ("source", "query"))
naive = naive_query_modulated_attention(Q, K, V, W_g)
print("\nBilinearly modulated attention, six positions of width four:")
print(f"  the source-indexed and query-indexed outputs differ by {np.abs(source - query).max():.2f}")
print(f"  the (T, T, h) form of the query-indexed output equals the factored form to {np.abs(naive - query).max():.0e}")

print("\nAnalytic gradients of a whole layer compared with central differences, for all parameters and the input:")
for spelling in ("none", "bma", "bma-query", "g1+g2", "key:query:head:silu"):
    gates = Gates.parse(spelling)
    parameters = {gate.site: init_gate_parameters(rng, gate, d_model=4, num_heads=2) for gate in gates}
    layer = AttentionArrays(**init_multihead_weights(rng, 4, 2), gates=gates, gate_parameters=parameters)
    verdict = verify_layer_gradients(layer, rng.standard_normal((5, 4)))
    print(f"  {spelling:20} {'agree' if verdict['all_correct'] else 'DISAGREE'} ({len(verdict) - 1} arrays)")

scores = decompose_attention(rng.standard_normal((12, 8)), rng.standard_normal((12, 8)), np.eye(12))["scores"]
stored = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]
memory = {"beta": 1.0, "noise_scale": 0.5, "num_trials": 200}
success = {d: [retrieval_success(rng, d, count, **memory) for count in stored] for d in (4, 6, 8, 10)}
pictures = Path("tour")
pictures.mkdir(exist_ok=True)
for name, figure in {
    "attention": plot_attention_weights(attention_weights(scores, causal_mask(12)), title="Causal attention weights"),
    "temperature": plot_temperature_sweep(scores[-1]),
    "retrieval": plot_retrieval_success(stored, success),
}.items():
    figure.savefig(pictures / f"{name}.png", dpi=120)
    print(f"\nwrote {pictures / name}.png", end="")
print()
