from pathlib import PurePosixPath

import pytest
from layering import LAYERS, SOURCE, source_files, violations


@pytest.mark.parametrize("file", source_files(), ids=str)
def test_a_file_imports_only_what_its_layer_allows(file):
    found = violations((SOURCE / file).read_text(encoding="utf-8"), file)
    assert not found, "\n".join(map(str, found))


def test_the_walk_finds_the_library():
    assert {PurePosixPath("__init__.py"), PurePosixPath("gate.py"), PurePosixPath("tensors/random.py")} <= set(
        source_files()
    )


FORBIDDEN = {
    "an outside library": ("gate.py", "import math\nimport numpy", 2, "numpy"),
    "a submodule of one": ("tensors/softmax.py", "import scipy.special as s", 1, "scipy.special"),
    "a name from one": ("tensors/softmax.py", "from jax import numpy", 1, "jax.numpy"),
    "one of several on a line": ("tensors/softmax.py", "import math, numpy, ray", 1, "ray"),
    "a lookalike of an allowed one": ("tensors/softmax.py", "import numpy_like", 1, "numpy_like"),
    "a lazy import": ("tensors/softmax.py", "def f():\n    import torch", 2, "torch"),
    "an import in a method": ("flax/gate.py", "class C:\n    async def f(self):\n        import torch", 3, "torch"),
    "an import for the type checker": (
        "tensors/softmax.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from torch import Tensor",
        3,
        "torch.Tensor",
    ),
    "an import that may fail": ("gate.py", "try:\n    import numpy\nexcept ImportError:\n    pass", 2, "numpy"),
    "an import by name": ("tensors/softmax.py", "import importlib\nimportlib.import_module('ray')", 2, "ray"),
    "an import by a computed name": ("tensors/softmax.py", "__import__(kind)", 1, "__import__(...)"),
    "another layer": ("torch/gate.py", "from tidegate.flax import gate", 1, "tidegate.flax.gate"),
    "another layer through the root": ("flax/gate.py", "from tidegate import torch", 1, "tidegate.torch"),
    "another layer relatively": ("geometry/metric.py", "from ..experts import rates", 1, "tidegate.experts.rates"),
    "another layer from the package above": ("experts/rates.py", "from .. import geometry", 1, "tidegate.geometry"),
    "the layer's namesake": ("flax/gate.py", "import torch", 1, "torch"),
    "a layer that is named like an allowed library": ("lab/training/records.py", "import flax", 1, "flax"),
    "the root, which hides what is used": ("tensors/gating.py", "from tidegate import Gate", 1, "tidegate.Gate"),
    "more than the vocabulary at the root": (
        "__init__.py",
        "from .tensors import softmax",
        1,
        "tidegate.tensors.softmax",
    ),
    "another file of the vocabulary, upwards": ("sizes.py", "from . import gate", 1, "tidegate.gate"),
    "an outside library in the vocabulary": ("gates.py", "import numpy", 1, "numpy"),
    "a framework in the configurations": ("config.py", "import torch", 1, "torch"),
    "upwards": ("gate.py", "from tidegate.tensors import softmax", 1, "tidegate.tensors.softmax"),
    "matplotlib outside the plots": ("tensors/hopfield.py", "import matplotlib.pyplot", 1, "matplotlib.pyplot"),
    "a framework that is not lazy": ("tensors/autodiff.py", "import jax", 1, "jax"),
    "a framework in the else of a type check": (
        "tensors/random.py",
        "if TYPE_CHECKING:\n    import jax\nelse:\n    import torch",
        4,
        "torch",
    ),
    "a framework outside its adapter": ("geometry/jax_adapter.py", "import torch", 1, "torch"),
    "our layers outside the adapter": ("experts/models.py", "import tidegate.torch", 1, "tidegate.torch"),
    "transformers outside the two files": ("torch/attention.py", "import transformers", 1, "transformers"),
    "ray outside its executor": ("lab/training/executors/serial.py", "import ray", 1, "ray"),
    "ray in a file that has only the name": ("claims/executors/ray.py", "import ray", 1, "ray"),
    "scipy outside the statistics": ("lab/tasks/text.py", "import scipy", 1, "scipy"),
    "data sets outside the tasks": ("lab/training/train.py", "import sklearn.datasets", 1, "sklearn.datasets"),
    "anything in the lab's root": ("lab/__init__.py", "import math", 1, "math"),
    "the lab downwards from its claims": (
        "lab/training/run.py",
        "from tidegate.claims import sink",
        1,
        "tidegate.claims.sink",
    ),
    "an outside library in the plumbing": ("_json.py", "import numpy", 1, "numpy"),
    "the maths in the plumbing": ("_files.py", "import tidegate.tensors", 1, "tidegate.tensors"),
    "a framework in a refusal": ("_refusals.py", "import torch", 1, "torch"),
    "the plumbing in a word": ("_verdict.py", "from tidegate._json import read_as", 1, "tidegate._json.read_as"),
    "the lab in a page": ("report/page.py", "from tidegate.lab import run", 1, "tidegate.lab.run"),
    "a library of the cli elsewhere": (
        "lab/training/train.py",
        "from rich.progress import track",
        1,
        "rich.progress.track",
    ),
    "a verb's import for all verbs": (
        "cli.py",
        "import typer\nfrom tidegate.lab import run",
        2,
        "tidegate.lab.run",
    ),
    "the cli before it is called for": ("__main__.py", "from tidegate.cli import app", 1, "tidegate.cli.app"),
    "a package without a row": ("orphans/one.py", "", 1, "orphans"),
    "a file without a row": ("orphan.py", "import math", 1, "orphan"),
}


@pytest.mark.parametrize(("file", "source", "line", "name"), FORBIDDEN.values(), ids=FORBIDDEN)
def test_the_checker_names_a_forbidden_import(file, source, line, name):
    (found,) = violations(source, PurePosixPath(file))
    assert (found.file, found.line, found.name) == (file, line, name)
    assert str(found).startswith(f"{file}:{line}: {name}: ")


ALLOWED = {
    "__init__.py": "from importlib.metadata import version\nfrom tidegate.gate import Gate",
    "sizes.py": "from __future__ import annotations\nimport os.path",
    "gate.py": "from tidegate.sizes import HeadShape",
    "gates.py": "from .gate import Gate",
    "config.py": "from tidegate.tensors.rotary import Rotary",
    "tensors/softmax.py": "import array_api_compat.numpy\nfrom .bilinear import f\nfrom tidegate.gate import Gate",
    "tensors/plots.py": "import matplotlib.pyplot as plt",
    "tensors/autodiff.py": "if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch.func, jax",
    "geometry/torch_adapter.py": "import torch\nfrom ..torch import attention",
    "experts/jax_adapter.py": "import jax",
    "torch/gate.py": "import torch\nfrom torch import nn\nfrom . import rotary\nfrom ..tensors import layer",
    "torch/hf/model.py": "import transformers",
    "flax/gate.py": "from flax import nnx",
    "lab/__init__.py": '"""Experiments."""',
    "lab/training/executors/ray.py": "import ray",
    "lab/judging/distributions.py": "from scipy import stats",
    "lab/tasks/text/words.py": "import datasets, tokenizers, sklearn",
    "claims/sink.py": "from tidegate.lab import run\nfrom tidegate.torch import attention",
    "_json.py": "import types",
    "_files.py": "import os",
    "_refusals.py": "from tidegate.gates import Gates",
    "_verdict.py": "from typing import Literal",
    "report/page.py": "from tidegate._json import read_as\nimport jinja2",
    "__main__.py": "def main():\n    from tidegate.cli import app",
    "cli.py": "import typer\ndef compare():\n    from tidegate.lab import run",
}


@pytest.mark.parametrize(("file", "source"), ALLOWED.items(), ids=ALLOWED)
def test_the_checker_lets_an_allowed_import_pass(file, source):
    assert violations(source, PurePosixPath(file)) == []


def test_the_checker_is_tried_both_ways_on_every_layer():
    for tried in (ALLOWED, [file for file, *_ in FORBIDDEN.values()]):
        assert {PurePosixPath(file).parts[0].removesuffix(".py") for file in tried} >= set(LAYERS)
