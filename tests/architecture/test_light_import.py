import subprocess
import sys

FRAMEWORKS = {"torch", "jax", "flax", "ray", "transformers", "matplotlib", "scipy"}
MOST_MODULES = 150
"""That `import tidegate` may load, the standard library's included: about 110 today, in a tenth of a second."""


def fresh_import(statements: str) -> tuple[int, set[str]]:
    """How many modules the statements load in a new interpreter, and the names of those at the top level."""
    program = f"import sys; before = set(sys.modules); {statements}; print(*(set(sys.modules) - before))"
    modules = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    return len(modules), {name for name in modules if "." not in name}


def test_the_root_loads_no_array_library():
    _, modules = fresh_import("import tidegate")
    assert "tidegate" in modules
    assert not modules & (FRAMEWORKS | {"numpy", "array_api_compat"})


def test_the_root_loads_few_modules():
    assert fresh_import("import tidegate")[0] <= MOST_MODULES


def test_the_maths_load_no_framework():
    _, modules = fresh_import("import tidegate.tensors, tidegate.geometry")
    assert not modules & FRAMEWORKS
    _, modules = fresh_import("import tidegate.experts")
    assert not modules & (FRAMEWORKS - {"scipy"})


def test_the_vocabulary_of_pages_loads_nothing_that_draws_them():
    _, modules = fresh_import("import tidegate.report.page")
    assert not modules & (FRAMEWORKS | {"numpy", "plotly", "jinja2"})


def test_a_heavy_import_is_seen():
    count, modules = fresh_import("import tidegate.tensors.random; import torch")
    assert modules & FRAMEWORKS >= {"torch"}
    assert count > MOST_MODULES
