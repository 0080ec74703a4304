import os
from pathlib import Path

import covers
import hypothesis
import jax
import matplotlib as mpl
import pytest
from libraries import LIBRARIES

mpl.use("Agg")
jax.config.update("jax_enable_x64", True)
hypothesis.settings.register_profile("tidegate", derandomize=True, deadline=None, max_examples=20, database=None)
hypothesis.settings.load_profile("tidegate")

HERE = Path(__file__).parent
SLOWEST = (
    "test_documents.py",
    "lab/training/test_executors.py",
)
"""Files that take ten seconds or more, the longest first."""

QUICK_XLA = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_llvm_disable_expensive_passes=true",
)
"""What a test compiles runs once or twice: compiling is what takes the time."""


def pytest_addoption(parser):
    parser.addoption(
        "--full",
        action="store_true",
        help="run the whole products of gates, options, dtypes and masks instead of their covers, what is marked full, "
        "and JAX with the optimisations that users get",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "over(axes): run over a cover of the product of axes; with --full, over all of it"
    )
    config.addinivalue_line("markers", "full: run with --full alone")
    if not config.getoption("--full"):
        # Read when JAX begins to compute, which no test has done yet.
        os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *QUICK_XLA)).strip()


def pytest_generate_tests(metafunc):
    for mark in metafunc.definition.iter_markers("over"):
        (axes,) = mark.args
        chosen = covers.rows(axes, full=metafunc.config.getoption("--full"))
        values = [tuple(axes[argument].values[name] for argument, name in row.items()) for row in chosen]
        metafunc.parametrize(tuple(axes), values, ids=["-".join(row.values()) for row in chosen])


def pytest_collection_modifyitems(config, items):
    """Leave out what only `--full` runs, and begin with the slowest files: the last to end should be a short one."""
    if not config.getoption("--full"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
    order = {HERE / name: place for place, name in enumerate(SLOWEST)}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.fixture(scope="session", params=LIBRARIES, ids=lambda library: library.name)
def library(request):
    """Each array library in turn; JAX once eager and once jitted."""
    return request.param
