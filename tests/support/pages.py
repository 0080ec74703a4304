"""A page such as a comparison makes: four variants, five seeds, and every kind of panel. The numbers are made up."""

import base64
import hashlib
import html
import math
import random
import re

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
EVALUATIONS = 40
TOKENS = tuple(round(5_000_000 * (k + 1) / EVALUATIONS) for k in range(EVALUATIONS))


def comparison_page() -> Page:
    """The whole page; the same at each call."""
    return Page(
        title="Four gates on the standard library: g1 ends lower, the others do not differ",
        summary="Byte-level language modelling on 9.8 MB of Python sources; four variants, five seeds, 5.0 million "
        "tokens each, 0.21 million parameters. Made by `tidegate compare`.",
        sections=(
            Section(title="Verdicts", panels=(verdicts(),)),
            Section(
                title="Results", panels=(main_table(), intervals()), lead="Means over five seeds; lower loss is better."
            ),
            Section(
                title="Training", panels=(training_views(), difference_lines()), lead="Seeds faint, their mean bold."
            ),
            Section(title="Is it fair?", panels=(checks(),)),
            Section(title="What the gates do", panels=(gate_maps(), many_maps(), signed_maps())),
            Section(title="Length extrapolation", panels=(length_lines(),)),
            Section(title="How to reproduce", panels=(*caution(), *snippets())),
        ),
        data={
            "records": [
                {"variant": name, "seed": seed, "loss": loss(name, seed)} for name in VARIANTS for seed in SEEDS
            ]
        }
        | {"note": "</script><script>alert(1)</script>", "diverged": float("nan")},
        footer="tidegate 0.1.0 · Python 3.11.2 · 2 cores",
    )


def loss(name, seed, progress=1.0):
    """A made-up loss: a common course, an effect, a seed's own level and some noise."""
    rng = random.Random(f"{name} {seed} {progress:.4f}")
    level = random.Random(seed).gauss(0, 0.012)
    return 1.55 + 1.9 * math.exp(-6 * progress) + EFFECTS[name] * progress + level + rng.gauss(0, 0.003)


def verdicts():
    items = (
        Estimate(
            label="none", value=0.0, verdict="control", sentence="The control: validation loss 1.5547 nats per byte."
        ),
        Estimate(
            label="g1",
            value=-0.0312,
            low=-0.0371,
            high=-0.0253,
            verdict="better",
            sentence="Ends 2.0 % lower than the control; the whole interval is below zero.",
        ),
        Estimate(
            label="bma",
            value=0.0021,
            low=-0.0038,
            high=0.0072,
            verdict="equivalent",
            sentence="Differs by less than the margin of 0.5 % of the control's loss.",
        ),
        Estimate(
            label=SPECIAL,
            value=0.0187,
            low=-0.0030,
            high=0.0404,
            verdict="inconclusive",
            sentence="The interval holds zero and reaches beyond the margin: more seeds would be needed.",
        ),
    )
    return Verdicts(
        items=items,
        unit="nats/byte",
        rule="Differences to the control over five seeds, judged against the residual of the variant × seed table (12 "
        "degrees of freedom), 95 % intervals adjusted for three comparisons (Dunnett). Better or worse: the interval "
        "excludes zero. Equivalent: it lies within ±0.0078. Otherwise inconclusive. The smallest difference that this "
        "run could have seen is 0.0091.",
    )


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
        Column(title="adjusted p", digits=3),
        Column(title="speed", unit="tokens/s", better="high"),
        Column(title="peak memory", unit="MB", better="low"),
        Column(title="decode", unit="ms/token", digits=2, better="low"),
        Column(title="cache", unit="B/token"),
    )
    rows = (
        ("none", 213_504, None, 6.4, 1.5547, 0.0121, 2.2430, None, "", None, 41_210, 612, 1.31, 1024),
        ("g1", 221_696, 3.84, 6.6, 1.5235, 0.0117, 2.1980, -0.0312, "-0.0371 to -0.0253", 0.0, 38_904, 633, 1.44, 1024),
        (
            "bma",
            217_600,
            1.92,
            6.5,
            1.5568,
            0.0130,
            2.2460,
            0.0021,
            "-0.0038 to +0.0072",
            0.712,
            37_211,
            641,
            1.52,
            1024,
        ),
        (SPECIAL, 217_604, 1.92, 6.5, 1.5734, None, 2.2699, 0.0187, "-0.0030 to +0.0404", 0.098, None, 644, 1.57, 1040),
    )
    return Table(
        title="All four variants side by side",
        columns=columns,
        rows=rows,
        note="The best number of a column is marked.",
    )


def intervals():
    return Intervals(
        title="Only g1 lies wholly below zero",
        alternative="Intervals of three differences to the control; only that of g1 excludes zero.",
        x_label="difference in validation loss, nats/byte",
        items=verdicts().items[1:],
        margin=0.0078,
    )


def curves(scale, label):
    series = []
    for name in VARIANTS:
        x = tuple(scale[name] * tokens for tokens in TOKENS)
        runs = [tuple(loss(name, seed, tokens / TOKENS[-1]) for tokens in TOKENS) for seed in SEEDS]
        if name == "bma":
            runs[2] = (*runs[2][:25], *[None] * (EVALUATIONS - 25))
        series += [
            Series(label=f"{name}, seed {seed}", group=name, x=x, y=run, faint=True) for seed, run in enumerate(runs)
        ]
        known = [[y for y in column if y is not None] for column in zip(*runs, strict=True)]
        series.append(Series(label=name, group=name, x=x, y=tuple(sum(ys) / len(ys) for ys in known)))
    return Lines(
        title=f"All curves fall alike over {label.split(',')[0]}; g1 stays below from the middle on",
        alternative="Validation loss falls from about 3 to 1.55 nats per byte; g1 ends lowest.",
        x_label=label,
        y_label="validation loss, nats/byte",
        series=tuple(series),
    )


def training_views():
    views = (
        View(label="by tokens", panel=curves(dict.fromkeys(VARIANTS, 1), "tokens")),
        View(label="by FLOPs", panel=curves(dict(zip(VARIANTS, (1.28e6, 1.32e6, 1.3e6, 1.3e6), strict=True)), "FLOPs")),
        View(
            label="by time", panel=curves(dict(zip(VARIANTS, (2.4e-5, 2.6e-5, 2.7e-5, 2.7e-5), strict=True)), "time, s")
        ),
    )
    return Views(title="Validation loss while training", views=views)


def difference_lines():
    series = []
    for name in VARIANTS[1:]:
        runs = [[loss(name, s, t / TOKENS[-1]) - loss("none", s, t / TOKENS[-1]) for t in TOKENS] for s in SEEDS]
        mean = [sum(column) / len(column) for column in zip(*runs, strict=True)]
        gap = [None if 10 <= place < 13 and name == "bma" else y for place, y in enumerate(mean)]
        series.append(
            Series(
                label=name,
                group=name,
                x=TOKENS,
                y=tuple(gap),
                low=tuple(None if y is None else y - 0.005 for y in gap),
                high=tuple(None if y is None else y + 0.005 for y in gap),
            )
        )
    return Lines(
        title="The advantage of g1 grows until the end",
        alternative="The difference of g1 to the control goes from 0 to -0.03; the others stay near zero.",
        x_label="tokens",
        y_label="paired difference in loss, nats/byte",
        series=tuple(series),
        zero_line=True,
    )


def checks():
    items = (
        Check(
            name="Same data order", state="holds", detail="One order of batches for each seed, fingerprint `5f1c09`."
        ),
        Check(
            name="Shared initial weights", state="holds", detail="All weights that two variants have in common agree."
        ),
        Check(name="Equal tokens", state="holds", detail="5,000,000 for each run."),
        Check(
            name="Equal parameters",
            state="violated",
            detail=f"{SPECIAL} has 1.92 % more than the control; `--match params` makes them equal.",
        ),
        Check(
            name="Trained long enough",
            state="warning",
            detail="The loss of g1 still fell by 0.4 % over the last tenth.",
        ),
        Check(name="Learning rates", state="note", detail="One for all variants; `--tune-lr` picks one for each."),
    )
    return Checks(items=items)


def gate_maps():
    rng = random.Random(1)
    maps = [
        Map(label=name, values=tuple(tuple(rng.random() for _ in range(4)) for _ in range(4))) for name in VARIANTS[1:]
    ]
    maps.append(Map(label="a gate with an empty cell", values=((0.1, None), (0.9, 0.4))))
    return Maps(
        title="The gates of the last layer are nearly closed",
        alternative="Mean gates by layer and head, between 0 and 1; those of layer 3 are below 0.2.",
        row_label="layer",
        column_label="head",
        value_label="mean gate",
        maps=tuple(maps),
        low=0.0,
        high=1.0,
    )


def many_maps():
    rng = random.Random(2)
    values = [tuple(tuple(rng.random() * 0.3 for _ in range(16)) for _ in range(12)) for _ in VARIANTS]
    return Maps(
        title="First-key mass sits in the middle layers",
        alternative="Twelve layers by sixteen heads for each variant, between 0 and 0.3.",
        row_label="layer",
        column_label="head",
        value_label="mass on the first token",
        maps=tuple(Map(label=name, values=value) for name, value in zip(VARIANTS, values, strict=True)),
    )


def signed_maps():
    rng = random.Random(3)
    return Maps(
        title="Heads of g1 turned away from the first token",
        alternative="Differences to the control by layer and head, most of them below zero.",
        row_label="layer",
        column_label="head",
        value_label="change of entropy, nats",
        maps=(Map(label="g1", values=tuple(tuple(rng.gauss(-0.2, 0.4) for _ in range(8)) for _ in range(2))),),
        diverging=True,
    )


def length_lines():
    x = (32, 64, 128, 256, 512, 1024)
    series = tuple(
        Series(
            label=name,
            group=name,
            x=x,
            y=tuple(1.9 - 0.09 * k + 0.1 * max(0, k - 3) * (1 + place / 3) for k in range(6)),
        )
        for place, name in enumerate(VARIANTS)
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


def caution():
    one_size = "Only one size was run. Gates that help at one size have been found not to at another."
    return (
        Prose(paragraphs=(one_size, "Run `--preset small` before you rely on it."), caution=True),
        Prose(paragraphs=("The same command gives the same records, times aside.",)),
    )


def snippets():
    command = f"""tidegate compare --variants 'none,g1,bma,{SPECIAL}' \\
  --seeds 5 --tokens 5000000 --out runs/a-rather-long-folder-name/with-another-inside"""
    versions = "python 3.11.2\ntorch 2.13.0\n```fence```"
    return Snippet(title="Command", text=command), Snippet(title="Versions", text=versions)


def every_panel(page):
    """All panels in order, those of views in place of the views."""
    for section in page.sections:
        for panel in section.panels:
            yield from (view.panel for view in panel.views) if panel.kind == "views" else (panel,)


def require_policy(text, *, num_scripts=4):
    """Check that a page of HTML may fetch nothing, and that no script runs in it but those that its policy names."""
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
    # It holds for what stands after it.
    assert text.index("Content-Security-Policy") < min(text.index(tag) for tag in ("<script", "<style", "<link"))
