import json
from dataclasses import replace

import pytest
from errors import rejects
from lab_runs import LENGTH, STEPS, model_of, records_of, request_of, run_of, text_of, timeless

from tidegate.lab.compare import design
from tidegate.lab.compare import run as compare_module
from tidegate.lab.compare.design import base_runs, make_plan, num_parameters
from tidegate.lab.compare.presets import PRESETS
from tidegate.lab.compare.run import CHECKPOINTS, RunsFailedError, compare, records_path
from tidegate.lab.compare.summary import summarise
from tidegate.lab.compare.variants import parse_variants
from tidegate.lab.tasks.text import TextData
from tidegate.lab.training import train
from tidegate.lab.training.events import Ended, Phase, Progress
from tidegate.lab.training.executors.executor import SerialExecutor
from tidegate.lab.training.records import Costs, Grid, LayerMeasurements, Plan, Record, RecordFile
from tidegate.lab.training.run import Training

STEP = 4 * LENGTH
TRIED = Grid(rates=(1.0, 2.0), starts=(0.02, "torch"))


def planned(request):
    return make_plan(request, base_runs(request))


def compared(request, folder, *, executor=None, on_event=lambda _: None):
    return compare(request, folder, executor=executor or SerialExecutor(), on_event=on_event)


class Pretended:
    """An executor that trains nothing: runs end as they are told to, by default with a loss of 1."""

    def __init__(self, loss=lambda run: 1.0):
        self.loss = loss
        self.runs = []

    def require(self, runs):
        pass

    def execute(self, runs, *, checkpoints, report):
        for run in runs:
            self.runs.append(run)
            yield Record(
                id=run.id,
                run=run,
                status="finished",
                loss=self.loss(run),
                num_parameters=1,
                tokens=1,
                fingerprints={"batches": "", "validation": ""},
            )


def pretended(request, folder, loss=lambda run: 1.0):
    executor = Pretended(loss)
    compared(request, folder, executor=executor)
    return executor.runs


@pytest.fixture(scope="module")
def finished(in_miniature, tmp_path_factory):
    """A request, and the records that it gives."""
    folder = tmp_path_factory.mktemp("finished")
    request = request_of(text_of(folder), budget=4 * STEP)
    with pytest.MonkeyPatch.context() as patch:
        in_miniature(patch)
        return request, records_of(compared(request, folder / "out"))


@pytest.fixture(scope="module")
def diverged(in_miniature, tmp_path_factory):
    """A request with a variant that diverges, the lines that it gives, and their folder."""
    folder = tmp_path_factory.mktemp("diverged")
    request = request_of(text_of(folder), "none,wild=none@lr=1e6@weight_decay=1", budget=8 * STEP)
    with pytest.MonkeyPatch.context() as patch:
        in_miniature(patch, layers=True)
        return request, compared(request, folder / "out"), folder / "out"


@pytest.fixture(scope="module")
def tuned(in_miniature, tmp_path_factory):
    """A request that tunes learning rates, the lines that it gives, their folder, and how often the file was read."""
    folder = tmp_path_factory.mktemp("tuned")
    request = request_of(text_of(folder), grid=TRIED, budget=2 * STEP, num_seeds=1)
    original, calls = RecordFile.read, []
    with pytest.MonkeyPatch.context() as patch:
        in_miniature(patch)
        patch.setattr(RecordFile, "read", lambda self: (calls.append(self), original(self))[1])
        return request, compared(request, folder / "out"), folder / "out", len(calls)


class TestTheSameRequest:
    def test_gives_the_same_records_anywhere(self, finished, tmp_path, miniatures):
        request, records = finished
        assert len(records) == 6
        assert records_of(compared(request, tmp_path / "out")) == records

    def test_goes_on_where_it_stopped_and_ends_the_same(self, finished, tmp_path, miniatures):
        class Stopped:
            def __init__(self, after):
                self.after = after

            def require(self, runs):
                pass

            def execute(self, runs, *, checkpoints, report):
                yield from SerialExecutor().execute(runs[: self.after], checkpoints=checkpoints, report=report)
                raise KeyboardInterrupt

        request, records = finished
        for after in (0, 1, 2):
            with pytest.raises(KeyboardInterrupt):
                compared(request, tmp_path / "a", executor=Stopped(after))
        told = []
        lines = compared(request, tmp_path / "a", on_event=told.append)
        assert records_of(lines) == records
        assert next(event for event in told if isinstance(event, Phase)) == Phase(
            name="comparing", num_runs=3, num_done=3
        )
        assert len([event for event in told if isinstance(event, Ended)]) == 3

    def test_killed_right_after_it_wrote_a_record_leaves_nothing_behind_in_the_end(
        self, task, tmp_path, miniatures, monkeypatch
    ):
        request = request_of(task, budget=STEP)
        with monkeypatch.context() as patch:
            patch.setattr(compare_module, "forget_checkpoint", stop_at_once)
            with pytest.raises(KeyboardInterrupt):
                compared(request, tmp_path / "out")
        assert any((tmp_path / "out" / CHECKPOINTS).iterdir())
        compared(request, tmp_path / "out")
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["records.jsonl"]

    def test_done_before_does_nothing_more(self, task, tmp_path, miniatures):
        request = request_of(task, budget=STEP)
        before = compared(request, tmp_path / "out")
        content = records_path(tmp_path / "out").read_bytes()
        told = []
        assert compared(request, tmp_path / "out", on_event=told.append) == before
        assert told == [Phase(name="comparing", num_runs=0, num_done=6)]
        # The command and the place of the data do not matter.
        (tmp_path / "moved").mkdir()
        again = replace(request, task=text_of(tmp_path / "moved"), command="another")
        assert pretended(again, tmp_path / "out") == []
        assert records_path(tmp_path / "out").read_bytes() == content


class TestTheFile:
    def test_begins_with_the_plan_and_the_costs(self, task, tmp_path, miniatures):
        lines = compared(request_of(task, budget=STEP), tmp_path / "out")
        assert [type(line) for line in lines] == [Plan, Costs, *[Record] * 6, *[LayerMeasurements] * 2]
        assert lines[0] == planned(request_of(task, budget=STEP))
        assert lines[1].request == lines[0].request

    def test_is_read_once_and_holds_what_is_returned(self, tuned):
        _, lines, folder, num_reads = tuned
        assert num_reads == 1
        assert RecordFile(records_path(folder)).read() == lines


class TestALineThatIsRemoved:
    """What the error of a damaged line tells a user to do."""

    @pytest.mark.parametrize("number", [0, 1, 2, 9, 10, 13])
    def test_is_made_anew_by_the_same_command(self, task, tmp_path, miniatures, number):
        request = request_of(task, budget=STEP, num_seeds=1, grid=TRIED)
        if number == 0:
            request = replace(request, grid=None)
        before = pretend_lines(request, tmp_path / "out")
        number = min(number, len(before) - 1)
        lines = records_path(tmp_path / "out").read_text().splitlines(keepends=True)
        records_path(tmp_path / "out").write_text("".join(lines[:number] + lines[number + 1 :]))
        after = pretend_lines(request, tmp_path / "out")
        assert sorted(map(repr, after)) == sorted(map(repr, before))
        assert len(summarise(after).variants) == 2

    def test_with_the_costs_is_missed_where_runs_were_matched_by_them(self, task, tmp_path, miniatures):
        request = request_of(task, budget=STEP, match="time")
        pretend_lines(request, tmp_path / "out")
        path = records_path(tmp_path / "out")
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:1] + lines[2:]))
        with rejects("out"):
            pretend_lines(request, tmp_path / "out")

    def test_with_the_plan_leaves_costs_that_tell_another_comparison_apart(self, task, tmp_path, miniatures):
        pretend_lines(request_of(task, budget=STEP), tmp_path / "out")
        path = records_path(tmp_path / "out")
        path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
        with rejects("out", hint="It holds "):
            pretend_lines(request_of(task, budget=2 * STEP), tmp_path / "out")


def stop_at_once(*_):
    raise KeyboardInterrupt


def pretend_lines(request, folder):
    return compared(request, folder, executor=Pretended())


class TestAFolder:
    @pytest.mark.parametrize(
        "change",
        [
            {"num_seeds": 4},
            {"budget": 2 * STEP},
            {"match": "params"},
            {"preset": "small"},
            {"variants": parse_variants("none,bma@lr=1e-3")},
            {"variants": parse_variants("bma,none")},
        ],
        ids=repr,
    )
    def test_with_another_comparison_is_refused_in_its_words(self, task, tmp_path, miniatures, change):
        request = request_of(task, budget=STEP, command="tidegate compare --seeds 3")
        pretended(request, tmp_path / "out")
        content = records_path(tmp_path / "out").read_bytes()
        with rejects("out", hint="It holds tidegate compare --seeds 3."):
            pretended(replace(request, **change), tmp_path / "out")
        assert records_path(tmp_path / "out").read_bytes() == content

    def test_that_was_begun_elsewhere_is_refused(self, task, tmp_path, miniatures, monkeypatch):
        pretended(request_of(task, budget=STEP), tmp_path / "out")
        here = design.environment()
        monkeypatch.setattr(design, "environment", lambda: here | {"torch": "99"})
        with rejects("out", hint=f"torch {here['torch']}, now 99"):
            pretended(request_of(task, budget=STEP), tmp_path / "out")

    def test_is_not_made_for_a_request_that_cannot_be(self, task, tmp_path):
        for field, value in (("num_seeds", 0), ("num_seeds", 10_001), ("budget", 0), ("margin", -0.1)):
            with rejects(field):
                request_of(task, **{field: value})
        with rejects("data") as rejected:
            compared(request_of(replace(task, source=str(tmp_path / "gone.txt"))), tmp_path / "out")
        assert "gone.txt" in str(rejected.value.got)
        assert not (tmp_path / "out").exists()


class TestAFailure:
    def test_is_told_after_all_others_are_done_and_tried_again(self, task, tmp_path, miniatures, monkeypatch):
        original = train.build_model

        def broken(config, *, seed):
            if str(config.gate) == "bma" and seed == 0:
                raise MemoryError("no room for it")
            return original(config, seed=seed)

        request = request_of(task, budget=2 * STEP)
        with monkeypatch.context() as patch:
            patch.setattr(train, "build_model", broken)
            words = r"1 of 6 runs failed: bma \(seed 0\)\. The last error: MemoryError: no room for it"
            with pytest.raises(RunsFailedError, match=words):
                compared(request, tmp_path / "out")
        lines = RecordFile(records_path(tmp_path / "out")).read()
        statuses = [line.status for line in lines if isinstance(line, Record)]
        assert sorted(statuses) == ["failed"] + 5 * ["finished"]
        told = []
        lines = compared(request, tmp_path / "out", on_event=told.append)
        assert told[0] == Phase(name="comparing", num_runs=1, num_done=5)
        assert records_of(lines) == records_of(compared(request, tmp_path / "new"))

    def test_keeps_the_checkpoint_from_which_the_next_command_goes_on(self, task, tmp_path, miniatures, monkeypatch):
        original = train.evaluate

        def broken(model, batches):
            if calls and str(model.config.gate) == "bma":
                raise MemoryError("no room for it")
            calls.append(model)
            return original(model, batches)

        request, calls = request_of(task, budget=4 * STEP, num_seeds=1), []
        with monkeypatch.context() as patch:
            patch.setattr(train, "evaluate", broken)
            patch.setattr(Training, "evaluates_after", lambda self, step: step == 2)
            with pytest.raises(RunsFailedError, match=r"1 of 2 runs failed: bma \(seed 0\)"):
                compared(request, tmp_path / "out", executor=SerialExecutor(checkpoint_seconds=0))
        failed = base_runs(request)["bma"].id
        names = {path.name for path in (tmp_path / "out" / CHECKPOINTS).iterdir()}
        assert {f"{failed}.safetensors", f"{failed}.previous.safetensors"} <= names
        told = []
        lines = compared(request, tmp_path / "out", on_event=told.append)
        assert next(event for event in told if isinstance(event, Progress)).step == 3
        # The first seed's checkpoints go once its layers are measured, the failed run's with its record.
        assert not (tmp_path / "out" / CHECKPOINTS).exists()
        assert [line.status for line in lines if isinstance(line, Record)] == ["finished", "failed", "finished"]

    def test_of_a_diverging_run_is_none(self, diverged, miniatures):
        request, lines, folder = diverged
        summary = summarise(lines)
        assert summary.comparison["wild"].verdict == "diverged"
        assert summary.comparison["wild"].num_diverged == 3
        assert pretended(request, folder) == []


class TestTheDesign:
    def test_has_every_variant_under_every_seed_block_by_block(self, task, tmp_path, miniatures):
        runs = pretended(request_of(task, "none,g1,bma"), tmp_path)
        assert [(run.variant, run.block, run.seed) for run in runs] == [
            (name, seed, seed) for seed in range(3) for name in ("none", "g1", "bma")
        ]
        assert {run.role for run in runs} == {"comparison"}

    def test_differs_between_variants_in_gate_and_name_alone(self, task, tmp_path, miniatures):
        first, second = pretended(request_of(task, "none,g1", num_seeds=1), tmp_path)
        assert replace(second, variant="none", model=replace(second.model, gate="none")) == first

    def test_gives_a_variant_its_own_options_and_seeds(self, task, tmp_path, miniatures):
        runs = pretended(request_of(task, "none,x=g1@lr=1e-3@clip=0.5@first_seed=100"), tmp_path)
        own = [run for run in runs if run.variant == "x"]
        assert {(run.training.lr, run.training.clip) for run in own} == {(1e-3, 0.5)}
        assert [(run.block, run.seed) for run in own] == [(0, 100), (1, 101), (2, 102)]
        assert {run.training.lr for run in runs if run.variant == "none"} == {1e-2}

    @pytest.mark.parametrize(("budget", "steps"), [(None, STEPS), (1, 1), (5 * STEP, 5)])
    def test_spends_the_budget(self, task, tmp_path, miniatures, budget, steps):
        request = request_of(task, budget=budget)
        assert {run.training.steps for run in pretended(request, tmp_path)} == {steps}
        assert planned(request).budget == (budget or PRESETS["lm"]["tiny"].budget)

    def test_matches_parameters(self, task, tmp_path, miniatures):
        runs = pretended(request_of(task, "none,g1,bma", match="params"), tmp_path)
        counts = {run.variant: num_parameters(run.model) for run in runs}
        assert counts["none"] == num_parameters(model_of("none"))
        # A channel of a feed-forward layer has 48 parameters here.
        assert max(abs(count - counts["none"]) for count in counts.values()) <= 24

    def test_matches_time_by_the_ratios_on_record_and_measures_them_once(self, task, tmp_path, miniatures):
        miniatures({"g1": 1.25, "bma": 1.5})
        request = request_of(task, "none,g1,bma", match="time", budget=60 * STEP)
        runs = pretended(request, tmp_path / "out")
        assert {run.variant: run.training.steps for run in runs} == {"none": 60, "g1": 48, "bma": 40}
        miniatures({"g1": 3.0, "bma": 3.0})
        assert pretended(request, tmp_path / "out") == []

    def test_of_given_runs_are_these_runs(self, task, tmp_path, miniatures):
        runs = tuple(
            run_of(task, variant=name, gate=name, seed=seed, block=seed) for seed in (0, 1) for name in ("none", "g1")
        )
        request = request_of(task, "none,g1", num_seeds=2, runs=runs)
        assert pretended(request, tmp_path) == list(runs)
        assert base_runs(request) == {"none": runs[0], "g1": runs[1]}
        assert planned(request).request != planned(replace(request, num_seeds=1, runs=runs[:2])).request


class TestLayers:
    @pytest.fixture(autouse=True)
    def measured(self, miniatures):
        miniatures(layers=True)

    def measurements(self, lines):
        return [line for line in lines if isinstance(line, LayerMeasurements)]

    def test_of_the_first_run_of_each_variant_are_measured(self, task, tmp_path, miniatures):
        lines = compared(request_of(task, "none,bma", budget=STEP), tmp_path / "out")
        firsts = [line.id for line in lines if isinstance(line, Record) and line.run.block == 0]
        assert [line.id for line in self.measurements(lines)] == firsts
        assert all(line.curvature is not None and line.gauge for line in self.measurements(lines))

    def test_whose_line_was_removed_are_made_anew_by_training_the_run_again(self, task, tmp_path, miniatures):
        request, told = request_of(task, budget=STEP, num_seeds=1), []
        before = compared(request, tmp_path / "out")
        path = records_path(tmp_path / "out")
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
        after = compared(request, tmp_path / "out", on_event=told.append)
        assert after == before
        assert self.measurements(after)[-1].curvature is not None
        assert [event.num_runs for event in told if isinstance(event, Phase) and "retraining" in event.name] == [1]
        assert not (tmp_path / "out" / CHECKPOINTS).exists()

    def test_of_a_diverged_run_are_not(self, diverged):
        request, lines, _ = diverged
        (line,) = self.measurements(lines)
        assert line.id == base_runs(request)["none"].id

    def test_are_measured_by_the_next_command_if_the_first_was_stopped(self, task, tmp_path, miniatures, monkeypatch):
        def stop(run, checkpoint):
            raise KeyboardInterrupt

        request = request_of(task, budget=STEP)
        with monkeypatch.context() as patch:
            patch.setattr(compare_module, "measure_run", stop)
            with pytest.raises(KeyboardInterrupt):
                compared(request, tmp_path / "a")
        assert len(list((tmp_path / "a" / CHECKPOINTS).iterdir())) == 2
        told = []
        lines = compared(request, tmp_path / "a", on_event=told.append)
        assert told == [Phase(name="comparing", num_runs=0, num_done=6), Phase(name="measuring layers", num_runs=0)]
        assert self.measurements(lines) == self.measurements(compared(request, tmp_path / "b"))
        assert [path.name for path in (tmp_path / "a").iterdir()] == ["records.jsonl"]

    def test_without_the_checkpoint_have_a_reason_and_are_not_tried_again(self, task, tmp_path, miniatures):
        request = request_of(task, budget=STEP)
        assert len(pretended(request, tmp_path / "out")) == 6
        lines = compared(request, tmp_path / "out")
        assert {line.gauge_reason for line in self.measurements(lines)} == {
            "the checkpoint with the trained model is no longer there"
        }
        assert compared(request, tmp_path / "out") == lines


class TestTuning:
    def test_uses_the_best_setting_of_each_variant_on_seeds_of_its_own(self, task, tmp_path, miniatures):
        best = {"none": (2e-2, 0.02), "bma": (1e-2, "torch")}
        request = request_of(task, grid=TRIED)

        def loss(run):
            rate, start = best[run.variant]
            return 1 + abs(run.training.lr - rate) + (run.model.init != start)

        runs = pretended(request, tmp_path, loss)
        tuned = [run for run in runs if run.role == "comparison"]
        tried = [run for run in runs if run.role == "tuning"]
        chosen = {(run.variant, run.training.lr, run.model.init) for run in tuned}
        assert chosen == {("none", 2e-2, 0.02), ("bma", 1e-2, "torch")}
        assert not {run.seed for run in tuned} & {run.seed for run in tried}
        assert runs == tried + tuned

    def test_a_map_chooses_nothing(self, task, tmp_path, miniatures):
        runs = pretended(request_of(task, grid=replace(TRIED, chooses=False)), tmp_path, lambda run: run.training.lr)
        assert sum(run.role == "tuning" for run in runs) == 2 * 3 * 4
        assert {(run.training.lr, run.model.init) for run in runs if run.role == "comparison"} == {(1e-2, 0.02)}

    def test_goes_on_to_the_same_choice(self, tuned, tmp_path, miniatures):
        request, lines, folder, _ = tuned
        cut = [json.loads(line) for line in records_path(folder).read_text().splitlines()]
        kept = [line for number, line in enumerate(cut) if number < 9]
        (tmp_path / "cut").mkdir()
        records_path(tmp_path / "cut").write_text("".join(json.dumps(line) + "\n" for line in kept))
        assert records_of(compared(request, tmp_path / "cut")) == records_of(lines)


def test_a_planted_effect_is_found_and_none_where_there_is_none(task, tmp_path, miniatures):
    variants = "none,slow=none@lr=1e-5,again=none,other=none@first_seed=100"
    lines = compared(request_of(task, variants, budget=40 * STEP), tmp_path / "out")
    results = summarise(lines).comparison
    assert results["slow"].verdict == "worse"
    assert results["again"].verdict == "identical"
    assert results["other"].verdict in ("equivalent", "inconclusive")
    twins = [[timeless(r) for r in lines if isinstance(r, Record) and r.run.variant == n] for n in ("none", "again")]
    blank = {"id": "", "run": {}}
    assert [replace(r, **blank) for r in twins[0]] == [replace(r, **blank) for r in twins[1]]


class TestAConstantOfExactly1:
    VARIANTS = "none,one=output:input:twosigmoid@placebo=constant"

    def test_is_the_control_bit_by_bit(self, task, tmp_path, miniatures):
        base = base_runs(request_of(task, self.VARIANTS, budget=4 * STEP))
        records = SerialExecutor().execute(list(base.values()), checkpoints=tmp_path, report=lambda _: None)
        none, one = records
        assert (one.status, one.loss, one.fingerprints) == ("finished", none.loss, none.fingerprints)

    def test_has_the_controls_records_and_is_not_trained(self, task, tmp_path, miniatures):
        trained = []

        class Counting(SerialExecutor):
            def execute(self, runs, *, checkpoints, report):
                trained.extend(run.variant for run in runs)
                yield from super().execute(runs, checkpoints=checkpoints, report=report)

        request = request_of(task, self.VARIANTS, budget=4 * STEP, grid=replace(TRIED, chooses=True))
        lines = compared(request, tmp_path / "out", executor=Counting())
        assert set(trained) == {"none"}
        own = {name: [r for r in records_of(lines).values() if r.run.variant == name] for name in ("none", "one")}
        assert len(own["one"]) == len(own["none"]) == len(trained)
        blank = {"id": "", "run": {}, "timing": None}
        ordered = [[replace(r, **blank) for r in sorted(own[n], key=place)] for n in own]
        assert ordered[0] == ordered[1]
        assert len([line for line in lines if isinstance(line, LayerMeasurements)]) == 2
        assert summarise(lines).comparison["one"].verdict == "identical"
        again = compared(request, tmp_path / "out", executor=Counting())
        assert (again, len(trained)) == (lines, len(own["none"]))


def place(record):
    run = record.run
    return run.role, run.block, run.training.lr, str(run.model.init)


def test_a_task_whose_facts_no_page_can_be_made_of_is_refused_before_the_first_run(tmp_path, monkeypatch):
    request = request_of(text_of(tmp_path))
    facts = TextData.facts.fget
    monkeypatch.setattr(TextData, "facts", property(lambda data: {"kind": facts(data)["kind"]}))
    executor = Pretended()
    with rejects("chance_loss"):
        compared(request, tmp_path / "out", executor=executor)
    assert executor.runs == []
    assert not (tmp_path / "out").exists()
