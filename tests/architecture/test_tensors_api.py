import ast
import importlib
import inspect
from inspect import Parameter

import pytest
from tensors_surface import SURFACE

import tidegate.tensors

LISTED = [(module, signature) for module, signatures in SURFACE.items() for signature in signatures]


def listed_parameters(signature: str) -> list[tuple[str, object]]:
    """Names and defaults of a written signature; `Parameter.empty` where there is no default."""
    arguments = ast.parse(f"def {signature}: ...").body[0].args
    defaults = [ast.literal_eval(default) for default in arguments.defaults]
    required = [Parameter.empty] * (len(arguments.args) - len(defaults))
    return [(argument.arg, default) for argument, default in zip(arguments.args, required + defaults, strict=True)]


def same(actual: object, listed: object) -> bool:
    """Equal and of one type: 1 is neither True nor 1.0."""
    return type(actual) is type(listed) and actual == listed


def written(default: object) -> str:
    return ", without a default" if default is Parameter.empty else f"={default!r}"


def assert_accepts(function, signature: str) -> None:
    """The function takes what the signature says, by position and by name; all else is an option."""
    actual = list(inspect.signature(function).parameters.values())
    listed = listed_parameters(signature)
    for parameter, (name, default) in zip(actual, listed, strict=False):
        assert parameter.name == name, f"{parameter.name} stands where {name} should"
        assert parameter.kind is Parameter.POSITIONAL_OR_KEYWORD, f"{name} must be accepted by position and by name"
        assert same(parameter.default, default), f"{parameter} should be {name}{written(default)}"
    assert len(actual) >= len(listed), f"{listed[len(actual) :]} are missing"
    for parameter in actual[len(listed) :]:
        assert parameter.kind is Parameter.KEYWORD_ONLY, f"the further {parameter.name} must be keyword-only"
        assert parameter.default is not Parameter.empty, f"the further {parameter.name} must have a default"


@pytest.mark.parametrize(("module", "signature"), LISTED, ids=[f"{m}.{s.split('(')[0]}" for m, s in LISTED])
def test_a_listed_function_can_be_called_as_listed(module, signature):
    name = signature.split("(")[0]
    home = importlib.import_module(f"tidegate.tensors.{module}")
    assert module == "plots" or getattr(tidegate.tensors, name) is getattr(home, name)
    assert_accepts(getattr(home, name), signature)


def test_the_table_of_examples_is_listed_too():
    assert "EINSUM_EXAMPLES" in tidegate.tensors.__all__
    assert tidegate.tensors.EINSUM_EXAMPLES


def test_the_checker_lets_further_options_pass():
    assert_accepts(lambda u, scale=None, *, xp=None: ..., "f(u, scale=None)")
    assert_accepts(lambda u, fill=-1e9, size=(8, 6): ..., "f(u, fill=-1000000000.0, size=(8, 6))")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda scale, u: ..., "scale stands where u should"),
        (lambda u, *, scale=True: ..., "scale must be accepted by position"),
        (lambda u, /, scale=True: ..., "u must be accepted by position and by name"),
        (lambda u, scale: ..., "scale should be scale=True"),
        (lambda u, scale=False: ..., "scale=False should be scale=True"),
        (lambda u, scale=1: ..., "scale=1 should be scale=True"),
        (lambda u=None, scale=True: ..., "u=None should be u, without a default"),
        (lambda u: ..., "scale.*missing"),
        (lambda u, scale=True, xp=None: ..., "the further xp must be keyword-only"),
        (lambda u, scale=True, **options: ..., "the further options must be keyword-only"),
        (lambda u, scale=True, *, xp: ..., "the further xp must have a default"),
    ],
)
def test_the_checker_names_each_departure(function, message):
    with pytest.raises(AssertionError, match=message):
        assert_accepts(function, "f(u, scale=True)")
