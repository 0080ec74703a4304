"""Which file may import what: the table, and the checker that walks a source file's imports against it."""

import ast
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

SOURCE = Path(__file__).parents[2] / "src" / "tidegate"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One row: what a package may import besides itself and the standard library. A name admits all below it."""

    allowed: tuple[str, ...] = ()
    only_in: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """More names, for the package's files that match a pattern."""
    deferred: tuple[str, ...] = ()
    """Names that must not be imported while the file itself is: only in functions, or for the type checker."""
    import_free: tuple[str, ...] = ()
    """The package's files that import nothing at all."""


# The vocabulary is three small files, each reading those before it, and the standard library alone.
VOCABULARY = ("tidegate.sizes", "tidegate.gate", "tidegate.gates")
PLUMBING = ("tidegate._json", "tidegate._files", "tidegate._refusals")
VERDICT = "tidegate._verdict"
MATHS = (*VOCABULARY, *PLUMBING, "tidegate.tensors")
MODELS = (*MATHS, "tidegate.config")
LIBRARY = (*MODELS, "tidegate.geometry", "tidegate.experts", "tidegate.torch", "tidegate.flax")
ADAPTERS = {"torch_adapter.py": ("torch", "tidegate.torch"), "jax_adapter.py": ("jax",)}

LAYERS: dict[str, Layer] = {
    "__init__": Layer(allowed=VOCABULARY),
    "sizes": Layer(),
    "gate": Layer(allowed=VOCABULARY[:1]),
    "gates": Layer(allowed=VOCABULARY[:2]),
    "_json": Layer(),
    "_files": Layer(),
    "_refusals": Layer(allowed=VOCABULARY),
    "_verdict": Layer(),
    "tensors": Layer(
        allowed=(*VOCABULARY, *PLUMBING, "array_api_compat", "numpy"),
        only_in={
            "plots.py": ("matplotlib",),
            "_drawing.py": ("matplotlib",),
            "autodiff.py": ("torch", "jax"),
            "random.py": ("torch", "jax"),
        },
        deferred=("torch", "jax"),
    ),
    "config": Layer(allowed=MATHS),
    "geometry": Layer(allowed=(*MATHS, "numpy", "scipy"), only_in=ADAPTERS),
    "experts": Layer(allowed=(*MATHS, "numpy", "scipy"), only_in=ADAPTERS),
    "torch": Layer(
        allowed=(*MODELS, "torch", "safetensors"),
        only_in={
            "retrofit/*": ("transformers",),
            "hf/*": ("transformers",),
            "observing/observation.py": ("matplotlib",),
            "observing/figure.py": ("matplotlib",),
            "observing/trainer_callback.py": ("transformers",),
        },
    ),
    "flax": Layer(allowed=(*MODELS, "jax", "flax", "safetensors")),
    "lab": Layer(
        allowed=(*LIBRARY, VERDICT, "tidegate.report.page", "torch", "numpy"),
        only_in={
            "*checkpoint.py": ("safetensors",),
            "*executors/ray.py": ("ray",),
            "*language_models.py": ("transformers", "safetensors"),
            "judging/*": ("scipy",),
            "studies/gate_tuning*": ("transformers",),
            "studies/*": ("scipy", "matplotlib"),
            "tasks/*": ("tokenizers", "datasets", "sklearn", "PIL"),
        },
        import_free=("__init__.py", "tasks/__init__.py", "training/executors/__init__.py", "studies/__init__.py"),
    ),
    "claims": Layer(allowed=(*LIBRARY, "tidegate.lab", "torch")),
    "report": Layer(allowed=(*VOCABULARY, "tidegate._json", VERDICT, "jinja2", "plotly")),
    "__main__": Layer(allowed=("tidegate.cli",), deferred=("tidegate.cli",)),
    "cli": Layer(
        allowed=("tidegate", "typer", "rich"),
        # Every verb imports what it needs, so that `tidegate --help` needs nothing.
        deferred=(*LIBRARY, "tidegate.lab", "tidegate.claims", "tidegate.report"),
    ),
}


@dataclass(frozen=True)
class Violation:
    """An import that the table does not allow; it prints as file, line, import and reason."""

    file: str
    line: int
    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.name}: {self.reason}"


def source_files() -> list[PurePosixPath]:
    """Every Python file of the library, relative to the package's root."""
    return sorted(PurePosixPath(path.relative_to(SOURCE).as_posix()) for path in SOURCE.rglob("*.py"))


def violations(source: str, file: PurePosixPath) -> list[Violation]:
    """What the table objects to in one file, given relative to the package's root."""
    package = file.parts[0].removesuffix(".py")
    layer = LAYERS.get(package)
    if layer is None:
        return [Violation(str(file), 1, package, "no row of the table covers this file; add one to LAYERS")]
    inside = "/".join(file.parts[1:])
    allowed = [f"tidegate.{package}", *layer.allowed]
    for pattern, names in layer.only_in.items():
        if fnmatch(inside, pattern):
            allowed.extend(names)

    def objection(found: "_Import") -> str | None:
        if inside in layer.import_free:
            return "this file imports nothing"
        if found.name.split(".")[0] in sys.stdlib_module_names:
            return None
        if not _below(found.name, allowed):
            return f"{file} may import only the standard library, {', '.join(allowed)}"
        if _below(found.name, layer.deferred) and not found.deferred:
            return "to be imported inside a function, where it is needed"
        return None

    return [
        Violation(str(file), found.line, found.name, reason)
        for found in _imports(source, file)
        if (reason := objection(found)) is not None
    ]


def _below(name: str, prefixes: Iterable[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


@dataclass(frozen=True)
class _Import:
    line: int
    name: str
    """Absolute and dotted; `from a import b` is `a.b`, since b may be a module."""
    deferred: bool


def _imports(source: str, file: PurePosixPath) -> list[_Import]:
    collector = _Collector(("tidegate", *file.parent.parts))
    collector.visit(ast.parse(source))
    return collector.found


class _Collector(ast.NodeVisitor):
    def __init__(self, package: tuple[str, ...]):
        self.found: list[_Import] = []
        self._package = package
        self._deferred = False

    def visit_Import(self, node: ast.Import) -> None:
        self._add(node, (alias.name for alias in node.names))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._package[: len(self._package) + 1 - node.level] if node.level else ()
        base = (*base, *filter(None, [node.module]))
        self._add(node, (".".join((*base, alias.name)) for alias in node.names))

    def visit_Call(self, node: ast.Call) -> None:
        called = getattr(node.func, "attr", getattr(node.func, "id", None))
        if called in ("import_module", "__import__"):
            name = getattr(node.args[0], "value", None) if node.args else None
            self._add(node, [name if isinstance(name, str) else f"{called}(...)"])
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._defer(node.body)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._defer(node.body)

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self._defer(node.body)
            for child in node.orelse:
                self.visit(child)
        else:
            self.generic_visit(node)

    def _defer(self, body: list[ast.stmt]) -> None:
        before, self._deferred = self._deferred, True
        for node in body:
            self.visit(node)
        self._deferred = before

    def _add(self, node: ast.stmt | ast.expr, names: Iterable[str]) -> None:
        self.found.extend(_Import(node.lineno, name, self._deferred) for name in names)
