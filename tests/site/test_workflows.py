"""What GitHub would run is what a reader of the Makefile runs."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def steps(workflow: Path) -> list[dict]:
    jobs = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_calls_the_makefile_and_pinned_actions(workflow):
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    assert commands == [f"make {workflow.stem} PYTHON=python"]
    assert workflow.stem in TARGETS
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]) for step in steps(workflow) if "uses" in step)


def test_the_tests_would_run_on_every_version_from_the_least_that_is_promised():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8"))["jobs"]
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    assert versions == ["3.11", "3.12", "3.13"]
    assert f'requires-python = ">={versions[0]}"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
