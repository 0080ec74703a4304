import json

import gated_types
import model_types
import other_types
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
        with rejects("model"):
            gated_types.check_gates(model_type, gate)


@pytest.mark.full
@pytest.mark.parametrize("kind", other_types.KINDS)
def test_other_kinds_are_gated_or_refused_as_the_table_says(kind):
    counts, failures = supported_models.count_others(kind)
    assert not failures
    assert f"| {kind} | {' | '.join(map(str, counts))} |" in supported_models.PAGE.read_text(encoding="utf-8")


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
        supported_models.Row("works", built=True, attends=True),
        supported_models.Row("half", built=True, attends=True, refusals={"bma": "of a reason"}, note="noted"),
        supported_models.Row("never", built=False, attends=True, note="for want of a package"),
        supported_models.Row("broken", built=True, attends=True, failures={"g1": "AssertionError: other\nbits"}),
    ]
    others = {"images": (9, 8, 7, 6)}
    works = {"works": ["g1"], "half": [], "broken": ["g1", "observe"], "gone": ["g1"]}
    before = {"commit": "abc", "transformers": "4.5.6", "works": works}
    page = supported_models.page_of(f"a{supported_models.BEGIN}old{supported_models.END}b", rows, others, before)
    assert page.startswith("a<!--")
    assert page.endswith("-->b")
    assert "old" not in page
    assert "| | types | g1 | bma | observe |" in page
    assert "| before | 4 | 3 (75%) | 0 (0%) | 1 (25%) |" in page
    assert "| now | 3 | 2 (67%) | 2 (67%) | 3 (100%) |" in page
    assert "*Before* is commit abc with transformers 4.5.6" in page
    assert "The sources of that commit were patched" in page
    assert "*before* it was observed only as it is built" in page
    assert "| `half` | yes | no (1) | yes | noted |" in page
    assert "| `broken` | **fails** | yes | yes | **g1 fails: AssertionError: other bits** |" in page
    assert "1. of a reason" in page
    assert "| images | 9 | 8 | 7 | 6 |" in page
    assert "| `never` | — | — | — | for want of a package |" in page


def test_a_type_that_loses_a_bit_is_named_and_the_others_are_tried(monkeypatch, capsys):
    whole = gated_types.check_gates

    def lose_a_bit(model_type, gate):
        if (model_type, gate) == ("llama", "g1"):
            raise AssertionError("other bits")
        return whole(model_type, gate)

    monkeypatch.setattr(gated_types, "check_gates", lose_a_bit)
    assert supported_models.main(["llama", "openai-gpt"]) == "llama fails: {'g1': 'AssertionError: other bits'}\n"
    assert "openai-gpt no cache to check" in capsys.readouterr().out


@pytest.mark.parametrize(("model_type", "note"), [("openai-gpt", "no cache to check"), ("bert", ""), ("llama", "")])
def test_what_was_checked_without_a_cache_is_marked(model_type, note):
    assert supported_models.row_of(model_type).note == note
    rows = supported_models.PAGE.read_text(encoding="utf-8").splitlines()
    (row,) = (line for line in rows if line.startswith(f"| `{model_type}` |"))
    assert row == f"| `{model_type}` | yes | yes | yes | {note} |"


def test_what_the_page_says_of_before_is_made_of_the_record():
    record = json.loads(supported_models.BEFORE.read_text(encoding="utf-8"))
    works = record["works"].values()
    shares = [sum(column in each for each in works) for column in supported_models.COLUMNS]
    page = supported_models.PAGE.read_text(encoding="utf-8")
    cells = [f"{count} ({count / len(works):.0%})" for count in shares]
    assert f"| before | {len(works)} | {' | '.join(cells)} |" in page
    made = supported_models.page_of(page, [supported_models.Row("llama", built=True, attends=True)], {}, record)
    (said,) = (line for line in made.splitlines() if line.startswith("*Before* is commit"))
    assert said in page.splitlines()


def test_a_cache_that_is_off_by_itself_is_stepped_through():
    model, lengths = model_types.build("mpt"), []
    model.register_forward_pre_hook(
        lambda _module, _args, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    assert gated_types._largest_step(model) < 1e-4
    assert lengths[-gated_types.CACHED :] == [1] * gated_types.CACHED
