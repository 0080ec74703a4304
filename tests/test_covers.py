"""The axes of the covers hold every gate, option and dtype, so that a new one is tested without being listed."""

import inspect

import torch
from covers import DTYPE, GATE, HALF, LIBRARY, OPTION, SPELLING
from layers import EXOTIC
from torch_layers import OPTIONS

from tidegate import legal_gates
from tidegate.torch import GatedAttention


def test_the_axes_hold_every_gate_option_and_dtype():
    assert {str(gate) for gate in legal_gates()} == set(GATE.values)
    assert {"none", *GATE.values, *EXOTIC} <= set(SPELLING.values)
    assert set(OPTION.values) == set(OPTIONS)
    assert set(DTYPE.values.values()) == {torch.float64, torch.float32, torch.bfloat16, torch.float16}
    assert set(HALF.values.values()) == {dtype for dtype in DTYPE.values.values() if dtype.itemsize == 2}


def test_the_option_sets_turn_on_every_option_of_a_layer_that_is_not_random():
    named = set().union(*OPTIONS.values())
    others = {"d_model", "num_heads", "gate", "dropout", "recompute_gate", "device", "dtype"}
    assert named | others == set(inspect.signature(GatedAttention).parameters)


def test_eager_jax_runs_a_law_of_each_file_and_the_slowest_files_exist(request):
    (own,) = [plugin for plugin in request.config.pluginmanager.get_plugins() if hasattr(plugin, "SLOWEST")]
    laws = [own.law_of(item) for item in request.session.items]
    files = {name: {file for file, _, library in laws if library == name} for name in LIBRARY.values}
    # Laws of autodiff are about functions that JAX traces itself, and run on eager arrays alone.
    assert files["jax"] == files["numpy"] == files["torch"] >= files["jax-jit"]
    assert [name for name in own.SLOWEST if not (own.HERE / name).exists()] == []
