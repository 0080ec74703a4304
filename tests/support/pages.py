"""A page like that of a comparison: four variants, five seeds, and every kind of panel. The numbers are synthetic."""

import base64
import hashlib
import html
import math
import random
import re
from statistics import fmean

from tidegate.report.page import (
    Check,
    Checks,
    Column,
    Estimate,
    Intervals,
    Lines,
    Map,
    Maps,
    Page,
    Prose,
    Section,
    Series,
    Snippet,
    Table,
    Verdicts,
    View,
    Views,
)

SPECIAL = 'wide <b>bold</b> & "quoted" | [gate]'
"""A name that HTML, Markdown and plotly would each misread."""

VARIANTS = ("none", "g1", "bma", SPECIAL)
SEEDS = range(5)
EFFECTS = {"none": 0.0, "g1": -0.0312, "bma": 0.0021, SPECIAL: 0.0187}
TOKENS = tuple(125_000 * (k + 1) for k in range(40))


def comparison_page() -> Page:
    """The whole page; the same at each call."""
    losses = [{"variant": name, "seed": seed, "loss": loss(name, seed)} for name in VARIANTS for seed in SEEDS]
    return Page(
        title="Four gates on the standard library: g1 ends lower, the others do not differ",
        summary="Byte-level language modeling on 9.8 MB of Python sources. Made by `tidegate compare`.",
        sections=(
            Section(title="Verdicts", panels=(verdicts(),)),
            Section(title="Results", panels=(main_table(), intervals()), lead="Means over five seeds."),
            Section(title="Training", panels=(training_views(),), lead="Thin lines are seeds."),
            Section(title="Is it fair?", panels=(checks(),)),
            Section(title="What the gates do", panels=(gate_maps(),)),
            Section(title="Length extrapolation", panels=(length_lines(),)),
            Section(title="How to reproduce", panels=(*prose(), *snippets())),
        ),
        data={"records": losses, "note": "</script><script>alert(1)</script>", "diverged": float("nan")},
        footer="tidegate 0.1.0 · Python 3.11.2 · 2 cores",
    )


def loss(name, seed, progress=1.0):
    """A synthetic loss: a common curve, an effect, a level of the seed and some noise."""
    rng = random.Random(f"{name} {seed} {progress:.4f}")
    level = random.Random(seed).gauss(0, 0.012)
    return 1.55 + 1.9 * math.exp(-6 * progress) + EFFECTS[name] * progress + level + rng.gauss(0, 0.003)


def verdicts():
    results = (
        ("none", "control", 0.0, None, None, "The control: validation loss 1.5547 nats per byte."),
        ("g1", "better", -0.0312, -0.0371, -0.0253, "Ends 2.0 % lower than the control."),
        ("bma", "equivalent", 0.0021, -0.0038, 0.0072, "Differs by less than the margin."),
        (SPECIAL, "inconclusive", 0.0187, -0.0030, 0.0404, "No significant difference."),
    )
    items = tuple(
        Estimate(label=label, verdict=verdict, value=value, low=low, high=high, sentence=sentence)
        for label, verdict, value, low, high, sentence in results
    )
    rule = "Differences to the control over five seeds, with 95 % intervals adjusted for three comparisons (Dunnett)."
    return Verdicts(items=items, unit="nats/byte", rule=rule)


def main_table():
    columns = (
        Column(title="variant"),
        Column(title="parameters", help="All weights, the gates' included."),
        Column(title="share", unit="%", digits=2, signed=True, help="Parameters beyond the control's."),
        Column(title="training", unit="TFLOP", digits=1),
        Column(title="loss", unit="nats/byte", digits=4, better="low", help="Mean over seeds, on held-out files."),
        Column(title="± sd", digits=4, help="Standard deviation over seeds."),
        Column(title="bits per byte", digits=4, better="low"),
        Column(title="difference", unit="nats/byte", digits=4, signed=True, help="Paired, to the control."),
        Column(title="95 % interval"),
        Column(title="speed", unit="tokens/s", better="high"),
    )
    rows = (
        ("none", 213_504, None, 6.4, 1.5547, 0.0121, 2.2430, None, "", 41_210),
        ("g1", 221_696, 3.84, 6.6, 1.5235, 0.0117, 2.1980, -0.0312, "-0.0371 to -0.0253", 38_904),
        ("bma", 217_600, 1.92, 6.5, 1.5568, 0.0130, 2.2460, 0.0021, "-0.0038 to +0.0072", 37_211),
        (SPECIAL, 217_604, 1.92, 6.5, 1.5734, None, 2.2699, 0.0187, "-0.0030 to +0.0404", None),
    )
    return Table(title="All variants", columns=columns, rows=rows, note="The best number of a column is marked.")


def intervals():
    return Intervals(
        title="Only g1 lies below zero",
        alternative="Intervals of three differences to the control; only that of g1 excludes zero.",
        x_label="difference in validation loss, nats/byte",
        items=verdicts().items[1:],
        margin=0.0078,
    )


def curves(label, scale):
    series = []
    x = tuple(scale * tokens for tokens in TOKENS)
    for name in VARIANTS:
        runs = [tuple(loss(name, seed, tokens / TOKENS[-1]) for tokens in TOKENS) for seed in SEEDS]
        mean = tuple(fmean(column) for column in zip(*runs, strict=True))
        if name == "bma":
            runs[2] = (*runs[2][:25], *[None] * (len(TOKENS) - 25))
        for seed, run in enumerate(runs):
            series.append(Series(label=f"{name}, seed {seed}", group=name, x=x, y=run, faint=True))
        series.append(Series(label=name, group=name, x=x, y=mean))
    return Lines(
        title=f"All curves fall alike over {label.split(',')[0]}",
        alternative="Validation loss falls from about 3 to 1.55 nats per byte; g1 ends lowest.",
        x_label=label,
        y_label="validation loss, nats/byte",
        series=tuple(series),
    )


def training_views():
    axes = {"by tokens": ("tokens", 1), "by FLOPs": ("FLOPs", 1.3e6), "by time": ("time, s", 2.6e-5)}
    views = tuple(View(label=label, panel=curves(*axis)) for label, axis in axes.items())
    return Views(title="Validation loss while training", views=views)


def checks():
    items = (
        Check(name="Same data order", state="holds", detail="Fingerprint `5f1c09`."),
        Check(name="Shared initial weights", state="holds", detail="All shared weights agree."),
        Check(name="Equal parameters", state="violated", detail=f"{SPECIAL} has 1.92 % more than the control."),
        Check(name="Trained long enough", state="warning", detail="The loss of g1 still fell by 0.4 %."),
        Check(name="Learning rates", state="note", detail="One for all variants."),
    )
    return Checks(items=items)


def gate_maps():
    rng = random.Random(0)
    rows = {name: tuple(tuple(rng.random() for _ in range(16)) for _ in range(12)) for name in VARIANTS[1:]}
    rows["a gate with an empty cell"] = ((0.1, None), (0.9, 0.4))
    return Maps(
        title="The gates of the last layer are nearly closed",
        alternative="Most gates of the last layer are nearly closed.",
        row_label="layer",
        column_label="head",
        value_label="mean gate",
        maps=tuple(Map(label=label, values=values) for label, values in rows.items()),
        low=0.0,
        high=1.0,
    )


def length_lines():
    x = (32, 64, 128, 256, 512, 1024)
    series = tuple(
        Series(label=name, group=name, x=x, y=tuple(1.9 - 0.09 * k + 0.1 * max(0, k - 3) for k in range(6)))
        for name in VARIANTS
    )
    return Lines(
        title="Beyond the training length every variant gets worse",
        alternative="Loss falls up to position 256, where training ended, and rises after it.",
        x_label="position, tokens",
        y_label="loss, nats/byte",
        series=series,
        log_x=True,
        log_y=True,
        marker=256,
        marker_label="training length",
    )


def prose():
    caution = ("Only one size was run.", "Run `--preset small` before you rely on it.")
    return Prose(paragraphs=caution, caution=True), Prose(paragraphs=("The same command gives the same records.",))


def snippets():
    command = f"tidegate compare --variants 'none,g1,bma,{SPECIAL}' \\\n  --out runs/a-rather-long-folder-name/inside"
    versions = "python 3.11.2\ntorch 2.13.0\n```fence```"
    return Snippet(title="Command", text=command), Snippet(title="Versions", text=versions)


def every_panel(page):
    """All panels in order, with the panels of views in place of the views."""
    for section in page.sections:
        for panel in section.panels:
            yield from (view.panel for view in panel.views) if panel.kind == "views" else (panel,)


def require_policy(text, *, num_scripts=4):
    """Check that the policy of an HTML page forbids requests and all scripts except the page's own."""
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    rules = dict(rule.split(" ", 1) for rule in html.unescape(policy).split("; "))
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts}
    assert len(hashes) == num_scripts
    assert set(rules.pop("script-src").split()) == {f"'sha256-{each}'" for each in hashes}
    assert rules == {
        "default-src": "'none'",
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    # A policy applies to what follows it.
    assert text.index("Content-Security-Policy") < min(text.index(tag) for tag in ("<script", "<style", "<link"))
