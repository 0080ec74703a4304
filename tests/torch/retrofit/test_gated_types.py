import model_types
import pytest
import supported_models
from errors import rejects

DOZEN = {
    "sinks": "gpt_oss",
    "a norm over all heads": "olmo2",
    "an unused cross-attention": "bart",
    "spelled out, one axis for batch and heads": "xglm",
    "spelled out, fused": "bloom",
    "spelled out, with PyTorch's attention": "falcon",
    "latents": "deepseek_v3",
    "a gate of its own": "qwen3_next",
    "a vision tower": "gemma3",
    "states beside attention": "jamba",
    "codebooks": "musicgen",
    "names its implementation": "minimax_m3_vl_text",
}
REFUSED = {("deepseek_v3", "bma"): "the value is recomputed from the cache"}
BUILT = sorted(set(model_types.model_types()) - set(model_types.NOT_BUILT) - set(model_types.NO_ATTENTION))


@pytest.mark.parametrize("gate", ["g1", "bma"])
@pytest.mark.parametrize("model_type", DOZEN.values(), ids=DOZEN)
def test_a_type_keeps_its_bits_learns_and_generates(model_type, gate):
    if reason := REFUSED.get((model_type, gate)):
        with rejects("model", hint=reason):
            supported_models.check_gates(model_type, gate)
    else:
        supported_models.check_gates(model_type, gate)


@pytest.mark.full
@pytest.mark.parametrize("gate", ["g1", "bma"])
@pytest.mark.parametrize("model_type", BUILT)
def test_every_type_is_gated_or_refused_as_the_table_says(model_type, gate):
    rows = supported_models.PAGE.read_text(encoding="utf-8").splitlines()
    (row,) = (line for line in rows if line.startswith(f"| `{model_type}` |"))
    said = row.split("|")[2 + supported_models.GATES.index(gate)].strip()
    if said == "yes":
        supported_models.check_gates(model_type, gate)
    else:
        with rejects("model"):
            supported_models.check_gates(model_type, gate)


@pytest.mark.full
@pytest.mark.parametrize("kind", supported_models.KINDS)
def test_other_kinds_are_gated_or_refused_as_the_table_says(kind):
    counts, failures = supported_models.count_others(kind)
    assert not failures
    assert f"| {kind} | {' | '.join(map(str, counts))} |" in supported_models.PAGE.read_text(encoding="utf-8")


def test_the_check_fails_where_gates_do_nothing(monkeypatch):
    monkeypatch.setattr(supported_models, "stir", lambda model: model)
    with pytest.raises(AssertionError, match="gates that do nothing"):
        supported_models.check_gates("llama", "g1")


def test_a_row_of_the_page_is_what_the_check_finds():
    row = supported_models._line(supported_models.row_of("openai-gpt"), [])
    assert row in supported_models.PAGE.read_text(encoding="utf-8").splitlines()
