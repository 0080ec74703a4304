import gc
import os
from pathlib import Path

import covers
import hypothesis
import jax
import matplotlib as mpl
import pytest
import surroundings
import torch
from jax_layers import QUICK_FLAGS

surroundings.isolate()
mpl.use("Agg")
jax.config.update("jax_enable_x64", True)
hypothesis.settings.register_profile("tidegate", derandomize=True, deadline=None, max_examples=20, database=None)
hypothesis.settings.load_profile("tidegate")

HERE = Path(__file__).parent
SLOWEST = (
    "test_documents.py",
    "lab/training/test_executors.py",
    "lab/training/test_ray.py",
    "torch/test_transforms.py",
    "report/test_browser.py",
    "faults/test_kills.py",
    "faults/test_surroundings.py",
    "faults/test_hostile_pages.py",
    "faults/test_flips.py",
    "faults/test_fuzz.py",
    "faults/test_hostile_models.py",
    "flax/test_decoder.py",
    "parity/test_layers.py",
    "tensors/test_hopfield.py",
    "flax/test_modules.py",
    "flax/test_kernel.py",
    "tensors/test_layer_gradients.py",
    "lab/compare/test_run.py",
    "laws/test_flax_laws.py",
    "laws/test_gate_laws.py",
    "cli/test_compare.py",
    "explore/test_explore.py",
    "lab/compare/test_cost.py",
    "tensors/test_softmax.py",
    "torch/hf/test_hf.py",
    "laws/test_torch_laws.py",
    "parity/test_language_models.py",
    "flax/test_generate.py",
)
"""The slowest files, the longest first."""


def pytest_addoption(parser):
    parser.addoption(
        "--full",
        action="store_true",
        help="run all combinations of gates, options, dtypes and masks, tests marked full, "
        "and JAX with full optimization",
    )
    parser.addoption(
        "--torture", action="store_true", help="run the faults of tests/faults at full length, and tests marked torture"
    )
    parser.addoption("--outcomes", help="append one line for each fault of tests/faults to this file")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "over(axes): run over a cover of the product of axes; with --full, over all of it"
    )
    config.addinivalue_line("markers", "full: run with --full alone")
    config.addinivalue_line("markers", "torture: run with --torture alone")
    config.addinivalue_line("markers", "gpu: skip where PyTorch sees no GPU; `make bench-gpu` runs these alone")
    config.addinivalue_line("markers", "fault(name): the row of docs/reliability.md, or a function of the parameters")
    if not config.getoption("--full"):
        # Compiled tests run once or twice. JAX reads this flag at its first computation.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK_FLAGS}".strip()


def pytest_generate_tests(metafunc):
    for mark in metafunc.definition.iter_markers("over"):
        (axes,) = mark.args
        chosen = covers.rows(axes, full=metafunc.config.getoption("--full"))
        values = [tuple(axes[argument].values[name] for argument, name in row.items()) for row in chosen]
        metafunc.parametrize(tuple(axes), values, ids=["-".join(row.values()) for row in chosen])


def pytest_collection_modifyitems(config, items):
    """Deselect tests that need options, and run the slowest files first, so that workers end at about the same time."""
    chosen = [
        not any(item.get_closest_marker(name) and not config.getoption(f"--{name}") for name in ("full", "torture"))
        for item in items
    ]
    if not config.getoption("--full"):
        kept = covers.without_most_eager_jax(map(law_of, items))
        chosen = [keep and choice for keep, choice in zip(kept, chosen, strict=True)]
    config.hook.pytest_deselected(items=[item for item, keep in zip(items, chosen, strict=True) if not keep])
    items[:] = [item for item, keep in zip(items, chosen, strict=True) if keep]
    if not torch.cuda.is_available():
        for item in filter(lambda item: item.get_closest_marker("gpu"), items):
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))
    order = {HERE / name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


def pytest_collection_finish():
    # Exclude imported modules from garbage collection, and collect less often: compilers create little garbage.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def law_of(item):
    """Return the file, the function and the array library of a test."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return str(item.path), item.originalname, getattr(parameters.get("library"), "name", None)


@pytest.fixture(scope="session", params=covers.LIBRARY.values.values(), ids=covers.LIBRARY.values)
def library(request):
    """Run a test on each array library; on JAX eager and jitted."""
    return request.param
