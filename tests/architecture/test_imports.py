from pathlib import PurePosixPath

import pytest
from layering import LAYERS, SOURCE, room_of, source_files, violations


@pytest.mark.parametrize("file", source_files(), ids=str)
def test_a_file_imports_only_what_its_layer_allows(file):
    found = violations((SOURCE / file).read_text(encoding="utf-8"), file)
    assert not found, "\n".join(map(str, found))


def test_the_walk_finds_the_library():
    assert {PurePosixPath("__init__.py"), PurePosixPath("gate.py"), PurePosixPath("tensors/random.py")} <= set(
        source_files()
    )


STUDY_ROOMS = [row.rpartition("/")[2] for row in LAYERS if row.startswith("lab/studies/")]

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
    "ray in a file that has only the name": ("lab/compare/ray.py", "import ray", 1, "ray"),
    "scipy outside the statistics": ("lab/tasks/text.py", "import scipy", 1, "scipy"),
    "data sets outside the tasks": ("lab/training/train.py", "import sklearn.datasets", 1, "sklearn.datasets"),
    "anything in the lab's root": ("lab/__init__.py", "import math", 1, "math"),
    "a room above": ("lab/training/run.py", "from tidegate.lab.compare import page", 1, "tidegate.lab.compare.page"),
    "a room beside": ("lab/observe/page.py", "from tidegate.lab.compare import page", 1, "tidegate.lab.compare.page"),
    "the page where verdicts are decided": (
        "lab/judging/judge.py",
        "from tidegate.report.page import Table",
        1,
        "tidegate.report.page.Table",
    ),
    "a renderer where a page is made": (
        "lab/compare/page.py",
        "from tidegate.report.html import html_page",
        1,
        "tidegate.report.html.html_page",
    ),
    "training where models are built for tasks": (
        "lab/tasks/text.py",
        "from tidegate.lab.training import run",
        1,
        "tidegate.lab.training.run",
    ),
    "judging where models are looked at": (
        "lab/models/curvature.py",
        "from tidegate.lab.judging import judge",
        1,
        "tidegate.lab.judging.judge",
    ),
    "another study": ("lab/studies/depth/run.py", "from ..rates import run", 1, "tidegate.lab.studies.rates.run"),
    "a study where studies are defined": (
        "lab/studies/study.py",
        "from tidegate.lab.studies.rates import run",
        1,
        "tidegate.lab.studies.rates.run",
    ),
    **{
        f"the comparison in {name}": (
            f"lab/studies/{name}/run.py",
            "from tidegate.lab.compare import run",
            1,
            "tidegate.lab.compare.run",
        )
        for name in STUDY_ROOMS
    },
    "what watches, below it": ("torch/attention.py", "import tidegate.torch.observing", 1, "tidegate.torch.observing"),
    "the retrofit in what watches": (
        "torch/observing/watcher.py",
        "from tidegate.torch.retrofit import add_gates",
        1,
        "tidegate.torch.retrofit.add_gates",
    ),
    "what watches in our model of transformers": (
        "torch/hf/model.py",
        "from tidegate.torch import observing",
        1,
        "tidegate.torch.observing",
    ),
    "our model of transformers in the retrofit": (
        "torch/retrofit/layer.py",
        "import tidegate.torch.hf",
        1,
        "tidegate.torch.hf",
    ),
    "anything in the words of a verdict": ("_verdict.py", "import tidegate.gate", 1, "tidegate.gate"),
    "an outside library in the plumbing": ("_json.py", "import numpy", 1, "numpy"),
    "the files in what breaks them off": ("_faults.py", "import tidegate._files", 1, "tidegate._files"),
    "a framework in the files of models": ("_model_files.py", "import safetensors", 1, "safetensors"),
    "a file of ours in the text": ("_text.py", "import tidegate._json", 1, "tidegate._json"),
    "the maths in the plumbing": ("_files.py", "import tidegate.tensors", 1, "tidegate.tensors"),
    "a framework in an error": ("_validation.py", "import torch", 1, "torch"),
    "a framework in a refusal": ("_refusals.py", "import torch", 1, "torch"),
    "a framework in the page to play with": ("explore/page.py", "import torch", 1, "torch"),
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
    "config.py": "from tidegate.gates import Gates",
    "tensors/softmax.py": "import array_api_compat.numpy\nfrom .bilinear import f\nfrom tidegate.gate import Gate",
    "tensors/plots.py": "import matplotlib.pyplot as plt",
    "tensors/autodiff.py": "if TYPE_CHECKING:\n    import torch\ndef f():\n    import torch.func, jax",
    "geometry/torch_adapter.py": "import torch\nfrom ..torch import attention",
    "geometry/jax_adapter.py": "import jax",
    "experts/torch_adapter.py": "import torch",
    "torch/gate.py": "import torch\nfrom torch import nn\nfrom . import rotary\nfrom ..tensors import layer",
    "torch/__init__.py": "from tidegate.torch.observing import observe\nfrom .attention import GatedAttention",
    "torch/hf/model.py": "import transformers\nfrom tidegate.torch.decoder import TransformerLM",
    "torch/observing/watcher.py": "import torch\nfrom tidegate.torch import kernel",
    "torch/retrofit/layer.py": "import transformers\nfrom tidegate.torch.gate import AttentionGate",
    "flax/gate.py": "from flax import nnx",
    "lab/__init__.py": '"""Experiments."""',
    "lab/training/executors/ray.py": "import ray",
    "lab/judging/judge.py": "from scipy import stats\nfrom tidegate._verdict import VerdictWord",
    "lab/tasks/text/words.py": "import datasets, tokenizers, sklearn",
    "lab/training/checkpoint.py": "import safetensors\nfrom tidegate.lab.tasks import text",
    "lab/models/hugging_face.py": "import transformers\nfrom tidegate.lab.training import model",
    "lab/compare/page.py": "from tidegate.report.page import Page\nfrom tidegate.lab.judging import rule_text",
    "lab/observe/run.py": "from tidegate.lab.models import language_models",
    "lab/studies/study.py": "from tidegate.report.page import Page",
    "lab/studies/catalogue.py": "from tidegate.lab.studies.rates import STUDY",
    **{f"lab/studies/{name}/run.py": "from tidegate.lab.studies.study import Study" for name in STUDY_ROOMS},
    "_verdict.py": "from typing import Literal",
    "_json.py": "import types",
    "_faults.py": "import signal",
    "_files.py": "import os\nfrom tidegate._faults import reach",
    "_model_files.py": "from tidegate.config import StackConfig\nfrom tidegate._files import require_shapes",
    "_text.py": "import re",
    "_validation.py": "from tidegate._text import echo",
    "_refusals.py": "from tidegate.gates import Gates",
    "explore/page.py": "from tidegate.gate import Gate\nfrom tidegate.report.embed import script_hash\nimport jinja2",
    "report/page.py": "from tidegate._json import read_as\nimport jinja2",
    "__main__.py": "def main():\n    from tidegate.cli import app",
    "cli.py": "import typer\ndef compare():\n    from tidegate.lab import run",
}


@pytest.mark.parametrize(("file", "source"), ALLOWED.items(), ids=ALLOWED)
def test_the_checker_lets_an_allowed_import_pass(file, source):
    assert violations(source, PurePosixPath(file)) == []


def test_the_checker_is_tried_both_ways_on_every_layer():
    for tried in (ALLOWED, [file for file, *_ in FORBIDDEN.values()]):
        assert {room_of(PurePosixPath(file).with_suffix("").parts) for file in tried} >= set(LAYERS)
