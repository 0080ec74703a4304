import json
import random
import re
from dataclasses import replace

import pytest
from lab_lines import page_of, recall_lines, replanned
from lab_runs import tampered, with_facts

from tidegate._json import add_checksum, encode
from tidegate.lab.compare.summary import summarise
from tidegate.lab.training.records import Costs, LayerMeasurements, RecordFile


def observed(**changes):
    """Changes the last observation of a record."""
    return lambda r: replace(r, observations=(*r.observations[:-1], replace(r.observations[-1], **changes)))


RECORDS = {
    "no fingerprints": (lambda r: replace(r, fingerprints={}), ": fingerprints.batches must be given"),
    "no parameters": (lambda r: replace(r, num_parameters=0), ": num_parameters must be at least 1; got 0."),
    "no loss": (lambda r: replace(r, loss=None), ": loss must be a number in a run that finished; got None."),
    "no tokens": (lambda r: replace(r, tokens=0), ": tokens must be at least 1 in a run that finished; got 0."),
    "a huge loss": (lambda r: replace(r, loss=1e200), ".loss must be at most 1e+100 in size; got 1e+200."),
    "a huge count": (lambda r: replace(r, tokens=10**400), ".tokens must be at most 1e+100 in size; got 1000"),
    "no figures of a gate": (
        lambda r: observed(gates={site: {} for site in r.observations[-1].gates} or {"output": {}})(r),
        ".gates.output must be mean, below and spread; got [].",
    ),
    "other gates": (observed(gates={}), ": gates must be at ['output']; got []."),
    "no activations": (observed(largest_activation=()), ".largest_activation must be a number for each layer; got ()."),
}
PLANS = {
    "images with positions": ({"kind": "image"}, ": loss_by_position must be empty for images"),
    "no length": ({"length": None}, "plan.task.length must be a whole number of at least 1"),
    "a huge fact": ({"num_documents": 10**400}, "plan.task.num_documents must be at most 1e+100 in size"),
}


def refusal(lines):
    with pytest.raises(ValueError, match=r"^These are not the records of one comparison: ") as refused:
        summarise(lines)
    assert str(refused.value).endswith("Take the file that `tidegate compare` wrote, or run that command again.")
    return str(refused.value)


@pytest.mark.parametrize(("change", "words"), RECORDS.values(), ids=RECORDS)
def test_a_record_that_no_run_leaves_is_refused_by_its_field(compared, change, words):
    forged = tampered(compared, "g1", change)
    (record,) = (line for line, before in zip(forged, compared, strict=True) if line is not before)
    assert f"run '{record.id}'" in (refused := refusal(forged))
    assert words in refused


@pytest.mark.parametrize(("change", "words"), PLANS.values(), ids=PLANS)
def test_a_plan_that_no_comparison_makes_is_refused_by_its_field(compared, change, words):
    assert words in refusal(replanned(compared, task=with_facts(compared[0].task, **change)))


def test_a_plan_without_runs_is_refused(compared):
    assert "plan.num_seeds must be at least 1; got 0." in refusal(replanned(compared[:2], num_seeds=0))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda own: replace(
                own, curvature=replace(own.curvature, layers=(replace(own.curvature.layers[0], quantiles=()),))
            ),
            ": curvature.quantiles must be a list of 5; got ().",
        ),
        (
            lambda own: replace(own, gauge=(replace(own.gauge[0], singular_values=((),)),)),
            ": gauge must be numbers for each head",
        ),
    ],
    ids=["quantiles", "singular values"],
)
def test_measurements_without_their_numbers_are_refused(compared, change, words):
    forged = [change(line) if isinstance(line, LayerMeasurements) else line for line in compared]
    assert words in refusal(forged)


def test_a_cost_beyond_every_machine_is_refused(compared):
    huge = [
        replace(line, items=(replace(line.items[0], peak_bytes=10**400), *line.items[1:]))
        if isinstance(line, Costs)
        else line
        for line in compared
    ]
    assert "costs.items[0].peak_bytes must be at most 1e+100 in size" in refusal(huge)


def places(value, path=()):
    """The paths to all that is inside a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield (*path, name)
        yield from places(item, (*path, name))


def forge(lines, rng):
    """Put something else in a random place; places with many neighbours, as in curves, are chosen no more often."""
    lines = json.loads(json.dumps(lines))
    line = rng.choice(lines)
    found = {}
    for path in places(line):
        found.setdefault(re.sub(r"\d+", "#", str(path)), []).append(path)
    path = rng.choice(rng.choice(list(found.values())))
    holder = line
    for name in path[:-1]:
        holder = holder[name]
    if rng.random() < 0.3:
        del holder[path[-1]]
    else:
        holder[path[-1]] = rng.choice([0, -1, 1e300, 10**400, 0.5, None, "", "sea", [], {}, [[]], True])
    return lines


# Only what these checks let through reaches the page, whose own faults are bugs and keep their traceback.
def test_whatever_is_forged_is_drawn_or_refused_in_words(tmp_path):
    rng, drawn, refused = random.Random(14), 0, 0
    lines, file = [encode(line) for line in recall_lines()], RecordFile(tmp_path / "records.jsonl")
    for _ in range(150):
        file.path.write_text("".join(f"{json.dumps(add_checksum(line))}\n" for line in forge(lines, rng)))
        try:
            page_of(file.read())
            drawn += 1
        except ValueError:
            refused += 1
    assert min(drawn, refused) > 20
