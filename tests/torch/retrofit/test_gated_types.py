import gated_types
import model_types
import other_types
import pytest
import supported_models

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
REFUSED = {("deepseek_v3", "bma"): "the value is made anew from the cache"}
BUILT = sorted(set(model_types.model_types()) - set(model_types.NOT_BUILT) - set(model_types.NO_ATTENTION))


@pytest.mark.parametrize("gate", ["g1", "bma"])
@pytest.mark.parametrize("model_type", DOZEN.values(), ids=DOZEN)
def test_a_type_keeps_its_bits_learns_and_generates(model_type, gate):
    if reason := REFUSED.get((model_type, gate)):
        with pytest.raises(ValueError, match=reason):
            gated_types.check_gates(model_type, gate)
    else:
        gated_types.check_gates(model_type, gate)


@pytest.mark.full
@pytest.mark.parametrize("gate", ["g1", "bma"])
@pytest.mark.parametrize("model_type", BUILT)
def test_every_type_is_gated_or_refused_as_the_table_says(model_type, gate):
    rows = supported_models.PAGE.read_text(encoding="utf-8").splitlines()
    (row,) = (line for line in rows if line.startswith(f"| `{model_type}` |"))
    said = row.split("|")[2 + supported_models.GATES.index(gate)].strip()
    if said == "yes":
        gated_types.check_gates(model_type, gate)
    else:
        with pytest.raises(ValueError, match="cannot take gates"):
            gated_types.check_gates(model_type, gate)


@pytest.mark.full
@pytest.mark.parametrize("kind", other_types.KINDS)
def test_other_kinds_are_gated_or_refused_as_the_table_says(kind):
    counts = " | ".join(map(str, supported_models.count_others(kind)))
    assert f"| {kind} | {counts} |" in supported_models.PAGE.read_text(encoding="utf-8")


def test_the_check_fails_where_gates_do_nothing(monkeypatch):
    monkeypatch.setattr(gated_types, "stir", lambda model: model)
    with pytest.raises(AssertionError, match="gates that do nothing"):
        gated_types.check_gates("llama", "g1")


def test_the_check_fails_where_a_step_is_not_gated_as_the_pass_is(monkeypatch):
    plain = gated_types.stir

    def stir_for_whole_passes(model):
        plain(model)
        gate = model.model.layers[0].self_attn.attn_gate.value.weight.data
        matrix = gate.clone()

        def close_with_a_cache(_module, _args, kwargs):
            gate.copy_(matrix * (kwargs.get("past_key_values") is None))

        model.register_forward_pre_hook(close_with_a_cache, with_kwargs=True)

    monkeypatch.setattr(gated_types, "stir", stir_for_whole_passes)
    with pytest.raises(AssertionError, match="other answers with a cache"):
        gated_types.check_gates("llama", "bma")


def test_the_table_is_made_of_rows():
    rows = [
        supported_models.Row("works", built=True, attends=True, refusals={}),
        supported_models.Row("half", built=True, attends=True, refusals={"bma": "of a reason"}, note="noted"),
        supported_models.Row("never", built=False, attends=True, refusals={}, note="for want of a package"),
    ]
    others = {"images": (9, 8, 7, 6)}
    page = supported_models.page_of(f"a{supported_models.BEGIN}old{supported_models.END}b", rows, others)
    assert page.startswith("a<!--")
    assert page.endswith("-->b")
    assert "old" not in page
    assert "| now | 2 (100%) | 1 (50%) | 2 (100%) |" in page
    assert "| `half` | yes | no (1) | yes | noted |" in page
    assert "1. of a reason" in page
    assert "| images | 9 | 8 | 7 | 6 |" in page
    assert "| `never` | — | — | — | for want of a package |" in page


def test_a_cache_that_is_off_by_itself_is_stepped_through():
    model, lengths = model_types.build("mpt"), []
    model.register_forward_pre_hook(
        lambda _module, _args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert gated_types._largest_step(model) < 1e-4
    assert lengths[-gated_types.CACHED :] == [1] * gated_types.CACHED
