import inspect

import pytest
import torch
from covers import DTYPE, GATE, HALF, LIBRARY, OPTION, SPELLING, TABLE, axis, rows, untouched, without_most_eager_jax
from layers import EXOTIC
from torch_layers import OPTIONS

from tidegate import legal_gates
from tidegate.torch import GatedAttention

EVERYTHING = TABLE | {"a dtype": {"gate": GATE, "dtype": DTYPE}}
every_product = pytest.mark.parametrize("axes", EVERYTHING.values(), ids=EVERYTHING)


@every_product
def test_a_cover_touches_every_value_of_every_argument(axes):
    assert untouched(axes, rows(axes, full=False)) == []


@every_product
def test_a_cover_from_which_a_value_is_removed_is_named(axes):
    cover = rows(axes, full=False)
    for argument, own in axes.items():
        for name in own.values:
            without = [row for row in cover if row[argument] != name]
            assert f"{argument}={name}" in untouched(axes, without)


@every_product
def test_a_cover_has_each_value_with_the_few_of_the_others(axes):
    cover = rows(axes, full=False)
    for argument, own in axes.items():
        others = [{name: few for name, few in row.items() if name != argument} for row in cover]
        few = [row for row in others if all(row[name] in axes[name].few for name in row)]
        assert len(few) >= len(own.values)


@every_product
def test_a_cover_is_a_small_part_of_its_product(axes):
    cover, product = rows(axes, full=False), rows(axes, full=True)
    assert all(row in product for row in cover)
    assert len(cover) < len(product) / 2


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


def test_every_array_library_has_its_turn(library):
    assert set(LIBRARY.values) == {"numpy", "jax", "jax-jit", "torch"}
    assert LIBRARY.values[library.name] is library


LAWS = [(file, law, name) for file in "ab" for law in ("first", "second") for name in LIBRARY.values]


def test_every_law_runs_on_every_library_but_eager_jax_which_runs_one_of_each_file():
    kept = [law for law, keep in zip(LAWS, without_most_eager_jax(LAWS), strict=True) if keep]
    assert [law for law in LAWS if law not in kept] == [("a", "second", "jax"), ("b", "second", "jax")]


def test_eager_jax_is_left_out_of_no_file_of_laws(request):
    laws = [own.law_of(item) for own in plugins(request) for item in request.session.items]
    files = {name: {file for file, _, library in laws if library == name} for name in LIBRARY.values}
    # Laws of autodiff are about functions that JAX traces itself, and run on eager arrays alone.
    assert files["jax"] == files["numpy"] == files["torch"] >= files["jax-jit"]


def plugins(request):
    return [plugin for plugin in request.config.pluginmanager.get_plugins() if hasattr(plugin, "SLOWEST")]


def test_the_files_that_come_first_are_there(request):
    (own,) = plugins(request)
    assert [name for name in own.SLOWEST if not (own.HERE / name).exists()] == []


def test_values_that_are_not_there_cannot_stand_for_the_others():
    with pytest.raises(AssertionError, match="not among the values: \\['c'\\]"):
        axis("ab", "c")


def test_the_whole_product_runs_on_request(request):
    full = request.config.getoption("--full")
    assert len(rows(TABLE["a layer"], full=full)) == (4 * len(SPELLING.values) if full else len(SPELLING.values) + 9)
