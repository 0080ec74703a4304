"""Which file may import what: the table, and the checker that walks a source file's imports against it."""

import ast
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

SOURCE = Path(__file__).parents[2] / "src" / "tidegate"


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One row: a room, and what it may import besides itself and the standard library."""

    about: str
    """What the room holds, in a sentence."""
    allowed: tuple[str, ...] = ()
    """A name admits all below it, but not a room inside it that has a row of its own."""
    only_in: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """More names, for the room's files that match a pattern."""
    deferred: tuple[str, ...] = ()
    """Names that must not be imported while the file itself is: only in functions, or for the type checker."""
    import_free: tuple[str, ...] = ()
    """The room's files that import nothing at all."""


# Groups of names that several rows admit; the map in docs/architecture.md calls them by these words.
VOCABULARY = ("tidegate.sizes", "tidegate.gate", "tidegate.gates", "tidegate._verdict", "tidegate.config")
CHECKS = ("tidegate._text", "tidegate._validation")
PLUMBING = (*CHECKS, "tidegate._json", "tidegate._faults", "tidegate._files", "tidegate._refusals")
MATHS = (*VOCABULARY, *PLUMBING, "tidegate.tensors")
LIBRARY = (
    *MATHS,
    "tidegate.geometry",
    "tidegate.experts",
    "tidegate.torch",
    "tidegate.torch.observing",
    "tidegate.torch.hf",
    "tidegate.torch.retrofit",
    "tidegate.flax",
)
TORCH_ADAPTER = {"torch_adapter.py": ("torch", "tidegate.torch")}
LOWER_ROOMS = ("tidegate.lab.judging", "tidegate.lab.training", "tidegate.lab.tasks", "tidegate.lab.models")
GROUPS = {
    "library": LIBRARY,
    "maths": MATHS,
    "vocabulary": VOCABULARY,
    "plumbing": PLUMBING,
    "lower rooms": LOWER_ROOMS,
}
UPPER_ROOM = (*LIBRARY, *LOWER_ROOMS, "tidegate.report.page", "torch", "numpy", "scipy")
STUDY = (*UPPER_ROOM, "tidegate.lab.studies", "matplotlib")

QUESTIONS = {
    "flat_or_curved": "Which gates bend which charts of attention?",
    "depth": "Does curvature grow with the number of layers?",
    "boundary": "Do gates help on bent boundaries?",
    "trained_layers": "How do the layers of a language model bend, before and after training?",
    "sinks": "Where does the weight of attention go: to the first key, to a sink, to the other keys?",
    "rates": "Which experts of a head can be estimated, by where the gate stands?",
}

LAYERS: dict[str, Layer] = {
    "__init__": Layer(
        about="What `import tidegate` gives: the vocabulary, and nothing heavy.", allowed=(*VOCABULARY, *CHECKS)
    ),
    "sizes": Layer(about="The sizes of a layer, with their defaults and checks.", allowed=CHECKS),
    "gate": Layer(
        about="`Gate`: one point of the vocabulary, its spelling, its rules, and the presets.",
        allowed=(*PLUMBING[:3], *VOCABULARY[:1]),
    ),
    "gates": Layer(
        about="`Gates`: the gates of one layer, at most one at each site.", allowed=(*PLUMBING[:3], *VOCABULARY[:2])
    ),
    "_verdict": Layer(about="The words of a verdict."),
    "config": Layer(
        about="The options of layers and models, each declared once.",
        allowed=(*VOCABULARY[:3], *PLUMBING),
    ),
    "_text": Layer(about="How text of others is shown: quoted, shortened, without what steers a terminal."),
    "_validation": Layer(about="`InputError`: what is wrong with a value, as data.", allowed=CHECKS[:1]),
    "_json": Layer(about="JSON: parsed, sealed by a digest, and read as frozen dataclasses.", allowed=CHECKS),
    "_faults": Layer(about="Points at which tests break off the writing of files."),
    "_files": Layer(
        about="Writing files whole or not at all; files of tensors with a digest.",
        allowed=PLUMBING[:4],
    ),
    "_model_files": Layer(
        about="What a model's file says of itself, checked before anything is built.", allowed=(*VOCABULARY, *PLUMBING)
    ),
    "_refusals": Layer(
        about="Checks of inputs, with one wording for every framework.", allowed=(*CHECKS, *VOCABULARY[:3])
    ),
    "tensors": Layer(
        about="Attention as mathematics on any array library: the reference for all else.",
        allowed=(*VOCABULARY, *PLUMBING, "array_api_compat", "numpy"),
        only_in={
            "plots.py": ("matplotlib",),
            "_drawing.py": ("matplotlib",),
            "autodiff.py": ("torch", "jax"),
            "primitives.py": ("torch", "jax"),
            "random.py": ("torch", "jax"),
        },
        deferred=("torch", "jax"),
    ),
    "geometry": Layer(
        about="The curvature of representations.",
        allowed=(*MATHS, "numpy", "scipy"),
        only_in=TORCH_ADAPTER | {"jax_adapter.py": ("jax",)},
    ),
    "experts": Layer(
        about="Attention as a hierarchical mixture of experts: decomposition, gauge, estimation.",
        allowed=(*MATHS, "numpy", "scipy"),
        only_in=TORCH_ADAPTER,
    ),
    "torch": Layer(
        about="Gated layers and models in PyTorch, from the layer to the kernel.",
        allowed=(*MATHS, "tidegate._model_files", "torch", "safetensors"),
        only_in={"__init__.py": ("tidegate.torch.observing", "tidegate.torch.retrofit")},
    ),
    "torch/observing": Layer(
        about="What watches the attention of any PyTorch model: `observe`, `Observer`, the one `Observation`.",
        allowed=(*MATHS, "tidegate.torch", "torch"),
        only_in={
            "observation.py": ("matplotlib",),
            "figure.py": ("matplotlib",),
            "interface.py": ("transformers",),
            "trainer_callback.py": ("transformers",),
        },
    ),
    "torch/hf": Layer(
        about="Our decoder as a model of transformers.",
        allowed=(*MATHS, "tidegate.torch", "torch", "safetensors", "transformers"),
    ),
    "torch/retrofit": Layer(
        about="Gates for loaded models of transformers.",
        allowed=(*MATHS, "tidegate.torch", "torch", "safetensors", "transformers"),
    ),
    "flax": Layer(
        about="The same layers and models in JAX: pure functions, and NNX modules over them.",
        allowed=(*MATHS, "tidegate._model_files", "jax", "flax", "safetensors"),
    ),
    "report": Layer(
        about="Pages: their vocabulary (`page.py`), and what draws it.",
        allowed=(*VOCABULARY, *PLUMBING, "jinja2", "plotly"),
    ),
    "explore": Layer(
        about="`tidegate explore`: a page to play with, which computes its numbers itself.",
        allowed=("tidegate.gate", "tidegate.report", "jinja2"),
    ),
    "lab": Layer(about="Experiments; folders only.", import_free=("__init__.py",)),
    "lab/tasks": Layer(
        about="Data: what is trained on.",
        allowed=(*VOCABULARY, *PLUMBING, "numpy", "torch", "tokenizers", "datasets", "sklearn", "PIL"),
    ),
    "lab/judging": Layer(
        about="Turns the losses of runs into verdicts. It knows no files and no pages.",
        allowed=(*VOCABULARY, "tidegate._json", "numpy", "scipy"),
    ),
    "lab/training": Layer(
        about="Turns one `Run` into one `Record`: the loop, its engine, checkpoints, records, executors.",
        allowed=(*LIBRARY, "tidegate.lab.tasks", "torch", "numpy"),
        only_in={"checkpoint.py": ("safetensors",), "executors/ray.py": ("ray",)},
    ),
    "lab/models": Layer(
        about="Language models, loaded to be looked at; their curvature and gauge.",
        allowed=(*LIBRARY, "tidegate.lab.tasks", "tidegate.lab.training", "tidegate.report.page", "torch", "numpy"),
        only_in={
            "hugging_face.py": ("transformers", "safetensors", "huggingface_hub"),
            "export.py": ("transformers",),
            "evaluate.py": ("lm_eval",),
        },
    ),
    "lab/compare": Layer(
        about="`tidegate compare`: turns a request into runs, verdicts and a page.", allowed=UPPER_ROOM
    ),
    "lab/observe": Layer(
        about="`tidegate observe`: observes a model on a text and makes a page of it.", allowed=UPPER_ROOM
    ),
    "lab/studies": Layer(
        about="What a study is, and the list of all.",
        allowed=(*LIBRARY, "tidegate.lab.training", "tidegate.report.page", "torch", "matplotlib"),
        only_in={"catalogue.py": ("tidegate.lab.studies.*",)},
    ),
    **{f"lab/studies/{name}": Layer(about=question, allowed=STUDY) for name, question in QUESTIONS.items()},
    "lab/studies/gate_tuning": Layer(
        about="Do gates learn when they are added to a trained model?", allowed=(*STUDY, "transformers")
    ),
    "__main__": Layer(about="The command `tidegate`.", allowed=("tidegate.cli",), deferred=("tidegate.cli",)),
    "cli": Layer(
        about="The verbs of the command line, a file for each, and their one progress display.",
        allowed=("tidegate.*", "typer", "rich"),
        # Every verb imports what it needs, so that `tidegate --help` needs nothing.
        deferred=(
            *(name for name in LIBRARY if name not in ("tidegate._files", "tidegate._text")),
            "tidegate.lab.*",
            "tidegate.report",
            "tidegate.explore",
        ),
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


def room_of(parts: Sequence[str]) -> str | None:
    """Return the row that covers a path or a dotted name below the package's root: the longest that matches."""
    rows = ("/".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((row for row in rows if row in LAYERS), None)


def violations(source: str, file: PurePosixPath) -> list[Violation]:
    """Return what the table objects to in one file, given relative to the package's root."""
    parts = file.with_suffix("").parts
    row = room_of(parts)
    if row is None:
        return [Violation(str(file), 1, parts[0], "no row of the table covers this file; add one to LAYERS")]
    layer, depth = LAYERS[row], row.count("/") + 1
    inside = "/".join(file.parts[depth:])
    allowed = [".".join(("tidegate", *parts[:depth])), *layer.allowed]
    for pattern, names in layer.only_in.items():
        if fnmatchcase(inside, pattern):
            allowed.extend(names)

    def objection(found: "_Import") -> str | None:
        if inside in layer.import_free:
            return "this file imports nothing"
        if found.name.split(".")[0] in sys.stdlib_module_names:
            return None
        if not _admits(allowed, found.name):
            return f"not among what the row {row!r} of LAYERS allows"
        if _admits(layer.deferred, found.name) and not found.deferred:
            return "to be imported inside a function, where it is needed"
        return None

    return [
        Violation(str(file), found.line, found.name, reason)
        for found in _imports(source, file)
        if (reason := objection(found)) is not None
    ]


def _admits(allowed: Iterable[str], name: str) -> bool:
    """Say whether a name is one of the allowed, or below one and in the same room; `x.*` admits all below x."""
    return any(
        name.startswith(entry.removesuffix("*"))
        if entry.endswith(".*")
        else name == entry or (name.startswith(f"{entry}.") and _room_of_name(name) == _room_of_name(entry))
        for entry in allowed
    )


def _room_of_name(name: str) -> str | None:
    """Return the room of a dotted name of the library; None for other libraries, and for the library's root."""
    package, *parts = name.split(".")
    return room_of(parts) if package == "tidegate" and parts else None


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


def room_table() -> str:
    """Return the table of docs/architecture.md: each room, what it holds, and what it may import."""
    head = ["| room | what it holds | imports of tidegate | of other libraries |", "|---|---|---|---|"]
    rows = (
        f"| `{row}` | {layer.about} | {_names(layer, own=True)} | {_names(layer, own=False)} |"
        for row, layer in LAYERS.items()
    )
    return "\n".join([*head, *rows])


def _names(layer: Layer, *, own: bool) -> str:
    """Return what a row admits in words: groups first, then single names, then those of some files alone."""

    def shown(names: Iterable[str]) -> list[str]:
        kept = [name for name in names if (name.split(".")[0] == "tidegate") is own]
        return [f"`{name.removeprefix('tidegate.').replace('.', '/')}`" if own else name for name in kept]

    left, words = list(layer.allowed), []
    if own and "tidegate.*" in left:
        return "everything"
    for group, members in GROUPS.items():
        if own and set(members) <= set(left):
            words.append(group)
            left = [name for name in left if name not in members]
    words += shown(left)
    patterns: dict[str, list[str]] = {}
    for pattern, names in layer.only_in.items():
        patterns.setdefault(" and ".join(shown(names)), []).append(f"`{pattern}`")
    words += [f"{names} (only {' and '.join(files)})" for names, files in patterns.items() if names]
    return ", ".join(words)


if __name__ == "__main__":
    print(room_table())
