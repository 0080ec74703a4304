"""The pages of every verb, full of names that would be markup and code: nothing runs, nothing is asked for."""

from dataclasses import replace
from pathlib import Path

import browser
import pytest
import torch
from lab_lines import lines_of, page_of
from lab_runs import model_of, text_of

from tidegate.lab.models.curvature import model_curvature
from tidegate.lab.models.curvature_panels import curvature_page
from tidegate.lab.models.language_models import make_language_model
from tidegate.lab.observe.page import observation_page
from tidegate.lab.studies.catalogue import STUDIES
from tidegate.lab.studies.study import page_of as study_page
from tidegate.lab.studies.study import read_record, record_of
from tidegate.lab.training.measurements import Sampling
from tidegate.report import write_page
from tidegate.torch import TransformerLM, observe

pytestmark = browser.needs_chromium

RECORDS = Path(__file__).parents[2] / "docs" / "records"
HOSTILE = (
    "</script><script>alert(1)</script>\"><img src=x onerror='alert(2)'><a href='javascript:alert(3)'>x</a>"
    "<svg/onload=alert(4)> {{7*7}} \x1b[31m \u202e | [a](javascript:alert(5)) `x`"
)
VARIANT = "</script><script>alert(1)</script><svg/onload alert(4)>"
"""Of a variant, whose name has no equals sign."""


def model():
    torch.manual_seed(0)
    return TransformerLM(model_of("bma")).eval()


def comparison_of_hostile_names(folder):
    text = text_of(folder)
    lines = lines_of(text, f"none,{VARIANT}=g1", num_seeds=3, command=f"tidegate compare --data {HOSTILE}")
    return page_of([replace(lines[0], description=HOSTILE), *lines[1:]])


def observation_of_hostile_names(folder):
    watched = model()
    with observe(watched) as watcher, torch.no_grad():
        watched(torch.arange(12)[None])
    return observation_page(watcher.observation(), model=HOSTILE, command=HOSTILE, num_sequences=1, length=12)


def curvature_of_hostile_names(folder):
    named = make_language_model(model(), name=HOSTILE)
    measured = model_curvature(named, torch.arange(12)[None], Sampling(num_positions=1, num_planes=1))
    return curvature_page(measured, command=HOSTILE)


def study_of_hostile_names(name, path):
    def page(folder):
        study = STUDIES[name]
        result = read_record(study, RECORDS / path)
        record = record_of(study, result) | {"finding": HOSTILE, "question": HOSTILE}
        return replace(study_page(study, record, result), title=HOSTILE, summary=HOSTILE)

    return page


PAGES = {
    "compare": comparison_of_hostile_names,
    "observe": observation_of_hostile_names,
    "curvature": curvature_of_hostile_names,
    "study": study_of_hostile_names("depth", "geometry/depth.json"),
    "study rates": study_of_hostile_names("rates", "experts/rates.json"),
}


@pytest.fixture(scope="module")
def chromium():
    with browser.launch_chromium() as chromium:
        yield chromium


@pytest.mark.fault(lambda verb: f"Hostile names on the page of `tidegate {verb}`")
@pytest.mark.parametrize(
    "verb", [*list(PAGES)[:2], *(pytest.param(v, marks=pytest.mark.torture) for v in [*PAGES][2:])]
)
def test_hostile_names_on_a_page_do_nothing(verb, chromium, tmp_path, report):
    threads = torch.get_num_threads()
    path = write_page(PAGES[verb](tmp_path), tmp_path / "page")
    torch.set_num_threads(threads)
    opened = browser.Opened(chromium, path)
    page = opened.page
    assert "alert(1)" in page.inner_text("body"), "the name is not on the page"
    assert page.evaluate("() => document.querySelectorAll('img, svg[onload], [onerror], [onclick]').length") == 0
    assert page.evaluate("() => [...document.links].filter((a) => a.href.startsWith('javascript:')).length") == 0
    # A script of a name that is not escaped would be kept from running by the policy, which complains of it.
    assert opened.complaints == []
    ran = page.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.foreign = true";
            document.body.append(script);
            return window.foreign === true;
        }"""
    )
    assert not ran, "the page has no Content-Security-Policy against foreign scripts"
    assert any("Content Security Policy" in complaint for complaint in opened.complaints)
    assert opened.dialogs == []
    assert opened.foreign_requests() == []
    opened.context.close()
    assert "\x1b" not in (tmp_path / "page" / "report.md").read_text()
    report(tried=1, outcome="no dialog, no request, no script")
