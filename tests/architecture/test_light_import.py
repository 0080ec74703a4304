import json
import subprocess
import sys

FRAMEWORKS = {"torch", "jax", "flax", "ray", "transformers", "matplotlib", "scipy"}
LIMIT_IN_SECONDS = 0.2

MEASURE = """
import json, sys, time
start = time.perf_counter()
{statements}
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted(name for name in sys.modules if "." not in name)]))
"""


def fresh_import(statements: str) -> tuple[float, set[str]]:
    """Seconds that the statements take in a new interpreter, and the top-level modules that are loaded after them."""
    command = [sys.executable, "-c", MEASURE.format(statements=statements)]
    seconds, modules = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return seconds, set(modules)


def test_the_root_loads_no_array_library():
    _, modules = fresh_import("import tidegate")
    assert "tidegate" in modules
    assert not modules & (FRAMEWORKS | {"numpy", "array_api_compat"})


def test_the_root_imports_in_a_blink():
    # The best of three: the machine may be busy, the import may not.
    assert min(fresh_import("import tidegate")[0] for _ in range(3)) < LIMIT_IN_SECONDS


def test_the_maths_load_no_framework():
    _, modules = fresh_import("import tidegate.tensors")
    assert not modules & FRAMEWORKS


def test_the_vocabulary_of_pages_loads_nothing_that_draws_them():
    _, modules = fresh_import("import tidegate.report.page")
    assert not modules & (FRAMEWORKS | {"numpy", "plotly", "jinja2"})


def test_a_heavy_import_is_seen():
    seconds, modules = fresh_import("import tidegate.tensors.random; import torch")
    assert modules & FRAMEWORKS >= {"torch"}
    assert seconds > LIMIT_IN_SECONDS
