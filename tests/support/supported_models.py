"""Check each causal model type of transformers, and write the tables of docs/models-supported.md.

`make models` runs this script over all types in some minutes. Run it again with another release of transformers: new
types are built from the generic sizes of model_types.py, and listed with the error if that fails. A type that fails a
check is marked in the table, and the script fails at the end.
"""

import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import model_types
import torch
import transformers
from model_types import fitting, generic_options
from observed_types import examine
from retrofit_models import stir
from transformers.models.auto import modeling_auto

from tidegate._validation import InputError
from tidegate.torch import gate_parameters
from tidegate.torch.retrofit import add_gates, remove_gates
from tidegate.torch.retrofit.probe import bitwise_equal, has_cache, probe_inputs, run_probe

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "models-supported.md"
BEGIN, END = "<!-- models: begin -->", "<!-- models: end -->"
GATES = ("g1", "bma")
COLUMNS = (*GATES, "observe")
UNCACHED = "no cache to check"
AHEAD = "tokens see later ones"
CACHED = 3
"""Tokens that are read one by one with a cache, after the others."""
KINDS = {
    "encoder and decoder": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked text": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "images": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "sound": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    "speech to text": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
}
OTHER_SIZES = {
    "num_layers": 2,
    "num_decoder_layers": 2,
    "d_kv": 8,
    "d_ff": 48,
    "dim": 32,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 48,
    "num_feat_extract_layers": 2,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (2, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "input_feat_per_channel": 8,
    "decoder_start_token_id": 1,
}
LARGEST = 3_000_000
"""Largest number of weights of a small model."""


@dataclass(frozen=True)
class Row:
    """The results of one type."""

    model_type: str
    built: bool
    attends: bool
    refusals: dict[str, str] = field(default_factory=dict)
    """The reasons why columns do not work; columns that work are left out."""
    failures: dict[str, str] = field(default_factory=dict)
    """The failed checks by column, which are defects."""
    note: str = ""

    def works(self, column):
        return column not in self.refusals and column not in self.failures


def row_of(model_type):
    """Check all columns on a tiny model."""
    if model_type in model_types.NOT_BUILT:
        return Row(model_type, built=False, attends=True, note=model_types.NOT_BUILT[model_type])
    attends = model_type not in model_types.NO_ATTENTION
    try:
        model = model_types.build(model_type)
    except Exception as error:
        return Row(model_type, built=False, attends=attends, note=f"the tiny model fails: {error}")
    if not attends:
        return Row(model_type, built=True, attends=False, note="no softmax attention")
    refusals, failures, left_alone = {}, {}, 0
    for gate in GATES:
        try:
            left_alone = max(left_alone, len(check_gates(model_type, gate).left_alone))
        except InputError as error:
            refusals[gate] = reason_of(error)
        except Exception as error:
            # Any other error is a defect: the table shows it, and the next types are checked.
            failures[gate] = f"{type(error).__name__}: {error}"
    try:
        if why := observed_reason(model_type):
            refusals["observe"] = why
    except Exception as error:
        failures["observe"] = f"{type(error).__name__}: {error}"
    gated = any(gate not in refusals and gate not in failures for gate in GATES)
    notes = [
        UNCACHED if gated and not steps_with_a_cache(model) else "",
        AHEAD if model_type in model_types.BOTH_WAYS else "",
        f"{left_alone} attention modules left alone" if left_alone else "",
    ]
    note = "; ".join(filter(None, notes))
    return Row(model_type, built=True, attends=True, refusals=refusals, failures=failures, note=note)


def check_gates(model_type, gate):
    """Add gates to a tiny model and check everything that `add_gates` promises.

    Raises ValueError if the model cannot take them, and AssertionError if a promise does not hold.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = model_types.build(model_type)
        inputs = model_types.inputs_of(model, padded=True)
        before = logits_of(model, inputs)
        report = add_gates(model, gate)
        assert report.bitwise_equal
        assert torch.equal(logits_of(model, inputs), before), "other bits"
        stir(model)
        assert not torch.equal(logits_of(model, inputs), before), "gates that do nothing"
        _require_gradients(model, inputs)
        # Without gates, a few models already give different outputs with a cache.
        own = _largest_step(model_types.build(model_type))
        assert _largest_step(model) <= max(1e-4, 2 * own), "other answers with a cache"
        remove_gates(model)
        assert torch.equal(logits_of(model, inputs), before), "other bits without the gates"
    return report


def logits_of(model, inputs):
    with torch.no_grad():
        return model(**inputs).logits


def _require_gradients(model, inputs):
    model.zero_grad()
    model(**inputs).logits.float().logsumexp(-1).sum().backward()
    modules = [module for module in model.modules() if "attn_gate" in dict(module.named_children())]
    assert modules
    for module in modules:
        moved = {
            name: weight.grad is not None and bool(weight.grad.any()) for name, weight in module.named_parameters()
        }
        gates = [name for name in moved if name.startswith("attn_gate.")]
        # A module that makes discrete choices, such as patches of bytes, has no gradients in its own weights either.
        others = any(moved[name] for name in moved if name not in gates)
        assert all(moved[name] == others for name in gates), f"no gradient in {type(module).__name__}: {moved}"
    model.zero_grad()


def steps_with_a_cache(model):
    """Return whether the model has a cache, so that the check includes tokens that are read one by one."""
    return has_cache(model, {"input_ids": model_types.inputs_of(model)["input_ids"]})


@torch.no_grad()
def _largest_step(model):
    """Return the largest relative difference between logits of tokens read one by one and in one pass."""
    if not steps_with_a_cache(model):
        return 0.0
    tokens = model_types.inputs_of(model)["input_ids"]
    whole = model(input_ids=tokens)
    step = model(input_ids=tokens[:, :-CACHED], use_cache=True)
    largest = 0.0
    for position in range(tokens.shape[1] - CACHED, tokens.shape[1]):
        token = tokens[:, position : position + 1]
        step = model(input_ids=token, past_key_values=step.past_key_values, use_cache=True)
        difference = (step.logits[:, -1] - whole.logits[:, position]).abs().max()
        largest = max(largest, float(difference / whole.logits.abs().max()))
    return largest


def reason_of(error):
    """Return the reason without the gate and the layer; only errors about the model have one."""
    assert error.field == "model"
    text = " ".join(error.hint.split()).split(", where ")[-1].removesuffix(".")
    return text[:1].lower() + text[1:]


def observed_reason(model_type):
    """Return the reason why `observe` does not support this type; empty if it does."""
    why = examine(model_type).why
    return "no attention call is seen" if "made no attention call" in why else why


def build_other(kind, model_type):
    """A tiny random model in evaluation mode; None if generic sizes do not give one."""
    names = KINDS[kind][model_type]
    model_class = getattr(transformers, names if isinstance(names, str) else names[0])
    config_class = model_class.config_class
    try:
        config = config_class(**generic_options(config_class) | fitting(config_class, OTHER_SIZES))
        with torch.device("meta"):
            if sum(weight.numel() for weight in model_class(config).parameters()) > LARGEST:
                return None
        torch.manual_seed(0)
        return model_class(config).eval()
    except Exception:
        # A type may need options that generic sizes do not have.
        return None


def check_other(kind, model_type, gate):
    """Add gates to a tiny model and check that they keep its outputs bitwise and train.

    Return None if there is no model, and False if the gates are rejected.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build_other(kind, model_type)
        if model is None:
            return None
        try:
            report = add_gates(model, gate)
        except ValueError:
            return False
        assert report.bitwise_equal
        inputs = probe_inputs(model)
        before = run_probe(model, inputs)
        stir(model)
        assert not bitwise_equal(run_probe(model, inputs), before), "gates have no effect"
        output = (each for each in model(**inputs).to_tuple() if isinstance(each, torch.Tensor) and each.requires_grad)
        sum(each.float().square().sum() for each in output).backward()
        assert all(weight.grad is not None and weight.grad.any() for weight in gate_parameters(model)), "no gradient"
        return True


def count_others(kind):
    """Count the types of a kind, those built here, and those that take each gate; list those that fail a check."""
    found, failures = {}, {}
    for name in KINDS[kind]:
        try:
            found[name] = [check_other(kind, name, gate) for gate in GATES]
        except Exception as error:
            found[name] = [False for _ in GATES]
            failures[name] = f"{type(error).__name__}: {error}"
    built = [each for each in found.values() if each[0] is not None]
    counts = len(found), len(built), *(sum(each[column] for each in built) for column in range(len(GATES)))
    return counts, failures


def page_of(page, rows, others):
    """Return the page with its tables replaced by these rows and counts of other kinds."""
    head, rest = page.split(BEGIN)
    attending = [row for row in rows if row.built and row.attends]
    counts = [sum(row.works(column) for row in attending) for column in COLUMNS]
    shares = [f"{count} ({count / len(attending):.0%})" for count in counts]
    reasons = list(dict.fromkeys(why for row in rows for why in row.refusals.values()))
    lines = [
        f"Made with transformers {transformers.__version__}, PyTorch {torch.__version__.split('+')[0]} and Python "
        f"{sys.version_info.major}.{sys.version_info.minor}: {len(rows)} types, of which "
        f"{sum(row.built for row in rows)} are built here and {len(attending)} of those have softmax attention.",
        "",
        f"| types | {' | '.join(COLUMNS)} |",
        f"|--:|{'--:|' * len(COLUMNS)}",
        f"| {len(attending)} | {' | '.join(shares)} |",
        "",
        f"| model type | {' | '.join(COLUMNS)} | |",
        f"|---|{':-:|' * len(COLUMNS)}---|",
        *(_line(row, reasons) for row in rows),
        "",
        "Why not:",
        "",
        *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1)),
        "",
        "Other kinds of models, built with generic sizes: outputs are bitwise unchanged, and each gate has a gradient.",
        "",
        f"| kind | types | built | {' | '.join(GATES)} |",
        f"|---|--:|--:|{'--:|' * len(GATES)}",
        *(f"| {kind} | {' | '.join(map(str, counts))} |" for kind, counts in others.items()),
    ]
    return "\n".join([head + BEGIN, *lines, END + rest.split(END)[1]])


def _line(row, reasons):
    if not (row.built and row.attends):
        return f"| `{row.model_type}` |{' — |' * len(COLUMNS)} {row.note} |"
    failed = (f"**{column} fails: {_in_a_cell(why)}**" for column, why in row.failures.items())
    note = "; ".join(filter(None, (*failed, row.note)))
    return f"| `{row.model_type}` | {' | '.join(_cell(row, column, reasons) for column in COLUMNS)} | {note} |"


def _cell(row, column, reasons):
    if column in row.failures:
        return "**fails**"
    return "yes" if row.works(column) else f"no ({reasons.index(row.refusals[column]) + 1})"


def _in_a_cell(text):
    return " ".join(text.split())[:200].replace("|", "/")


def main(names):
    """Check the named types, or all types and write the page; return the failures."""
    transformers.logging.set_verbosity_error()
    rows = []
    for model_type in names or model_types.model_types():
        rows.append(row := row_of(model_type))
        print(row.model_type, row.note, row.refusals or "", row.failures or "", flush=True)
    failures = {row.model_type: row.failures for row in rows if row.failures}
    if not names:
        others = {kind: count_others(kind) for kind in KINDS}
        failures |= {f"{name} ({kind})": why for kind, (_, failed) in others.items() for name, why in failed.items()}
        counts = {kind: each for kind, (each, _) in others.items()}
        PAGE.write_text(page_of(PAGE.read_text(encoding="utf-8"), rows, counts), encoding="utf-8")
    return "".join(f"{name} fails: {why}\n" for name, why in failures.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) or 0)
