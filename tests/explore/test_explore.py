"""The page of `tidegate explore` in a real browser: its numbers agree with the library, and it is accessible."""

import json
import random
from itertools import product

import jax
import numpy as np
import pytest
import torch
from browser import Opened, launch_chromium, needs_chromium
from closeness import assert_close
from pages import require_policy

from tidegate import Gate, Gates, InputError
from tidegate.explore import explore_page
from tidegate.explore.page import CHOICES, NUMBERS
from tidegate.geometry import gaussian_curvature, query_chart, sectional_curvature, weight_chart
from tidegate.sizes import HeadShape
from tidegate.tensors.attention import attention_output, attention_scores_with_metric, attention_weights
from tidegate.tensors.bilinear import scaled_euclidean_metric
from tidegate.tensors.gating import bilinearly_modulated_attention
from tidegate.tensors.layer import AttentionArrays
from tidegate.tensors.softmax import effective_number_of_states, entropy, free_energy, log_partition
from tidegate.torch import GatedAttention

pytestmark = needs_chromium

DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
READY = "html.js"
"""Everything is computed while the page loads."""
FOCUSED = """() => {
    const control = document.activeElement;
    if (control === document.body) return null;
    const reach = control.querySelector(".reach");
    const style = getComputedStyle(reach ?? control);
    return [control.ariaLabel ?? control.id, (reach ? style.stroke : style.outlineStyle) !== "none"];
}"""
"""Returns the name of the focused control, and whether the focus is visible; null at the end."""


@pytest.fixture(scope="module")
def browser():
    with launch_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    place = tmp_path_factory.mktemp("explore") / "explore.html"
    place.write_text(explore_page(), encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def desktop(browser, path):
    opened = Opened(browser, path, viewport=DESKTOP, color_scheme="light", ready=READY)
    yield opened
    opened.context.close()


@pytest.fixture(scope="module")
def handheld(browser, path):
    options = {"viewport": PHONE, "color_scheme": "dark", "is_mobile": True, "has_touch": True}
    opened = Opened(browser, path, reduced_motion="reduce", ready=READY, **options)
    yield opened
    opened.context.close()


@pytest.fixture
def page(desktop):
    return desktop.page


@pytest.fixture
def phone(handheld):
    return handheld.page


def number(text):
    return float(text.replace("−", "-"))


def vector(text):
    return [number(part) for part in text.strip("()").split(",")]


def plain(settings):
    """Return the settings with arrays as lists, for the page."""
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in settings.items()}


def assert_same(found, expected):
    """Compare numbers of the page, which may be integers, with those of the library."""
    assert_close(np.asarray(found, dtype=float), np.asarray(expected))


# A query among keys


def random_settings(rng, gate="none", sink=None):
    shapes = {"query": 2, "keys": (5, 2), "values": (5, 2), "queries": (5, 2), "metric": (2, 2), "gateMatrix": (2, 2)}
    arrays = {name: 2 * rng.standard_normal(shape) for name, shape in shapes.items()}
    return arrays | {"temperature": float(np.exp(rng.normal())), "gate": gate, "sink": sink}


def attend_in_page(page, settings):
    return page.evaluate("rows => rows.map(attend)", list(map(plain, settings)))


def test_scores_weights_and_what_follows_from_them_are_those_of_tensors(page):
    rng = np.random.default_rng(0)
    settings = [random_settings(rng) for _ in range(20)]
    for given, found in zip(settings, attend_in_page(page, settings), strict=True):
        scores = attention_scores_with_metric(given["query"][None], given["keys"], given["metric"])
        weights = attention_weights(scores, None, given["temperature"])
        assert_same(found["scores"], scores[0])
        assert_same(found["weights"], weights[0])
        assert_same(found["logPartition"], log_partition(scores, given["temperature"])[0])
        assert_same(found["freeEnergy"], free_energy(scores, given["temperature"])[0])
        assert_same(found["entropy"], entropy(weights)[0])
        assert_same(found["effectiveNumber"], effective_number_of_states(weights)[0])
        assert_same(found["output"], attention_output(weights, given["values"])[0])


def test_both_gates_are_bilinearly_modulated_attention(page):
    rng = np.random.default_rng(1)
    settings = [random_settings(rng, gate) for gate in ("bma", "bma-query") for _ in range(10)]
    settings = [row | {"metric": scaled_euclidean_metric(2), "temperature": 1.0} for row in settings]
    for given, found in zip(settings, attend_in_page(page, settings), strict=True):
        if given["gate"] == "bma":
            # Six positions, the last of which attends to the five others.
            zeros = np.zeros((1, 2))
            Q = np.concatenate([given["queries"], given["query"][None]])
            K, V = np.concatenate([given["keys"], zeros]), np.concatenate([given["values"], zeros])
            mask, index = np.arange(6)[None] < 5, "source"
        else:
            Q, K, V, mask, index = given["query"][None], given["keys"], given["values"], None, "query"
        expected = bilinearly_modulated_attention(Q, K, V, given["gateMatrix"], index=index, mask=mask)
        assert_same(found["output"], expected[-1])


@pytest.mark.parametrize("sink", [0.0, 1.3, -2.0])
def test_a_sink_is_one_more_key_whose_value_is_nothing(page, sink):
    rng = np.random.default_rng(2)
    settings = [random_settings(rng, sink=sink) for _ in range(10)]
    for given, found in zip(settings, attend_in_page(page, settings), strict=True):
        scores = attention_scores_with_metric(given["query"][None], given["keys"], given["metric"])[0]
        weights = attention_weights(np.append(scores / given["temperature"], sink)[None])
        assert_same(found["output"], attention_output(weights[:, :-1], given["values"])[0])
        assert_same(1 - found["kept"], weights[0, -1])


def test_extreme_temperatures_overflow_nowhere(page):
    row = random_settings(np.random.default_rng(3)) | {"temperature": 1e-4}
    (found,) = attend_in_page(page, [row])
    assert sorted(found["weights"]) == [0, 0, 0, 0, 1]
    assert found["entropy"] == 0
    assert np.isfinite(found["logPartition"])


def test_the_query_moves_by_keys_and_the_output_with_it(page):
    page.locator("#reset_query").click()
    handle = page.get_by_label("Query of the attending position")
    before = page.locator("#final_output").inner_text()
    handle.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Shift+ArrowDown")
    assert handle.get_attribute("aria-valuetext") == "1.15 across, 0.45 up"
    assert page.locator("#final_output").inner_text() != before


def test_a_finger_drags_the_query_and_does_not_scroll(handheld):
    page = handheld.page
    touch = handheld.context.new_cdp_session(page)
    handle = page.get_by_label("Query of the attending position")
    handle.scroll_into_view_if_needed()
    box, scrolled = handle.bounding_box(), page.evaluate("() => scrollY")
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for kind, place in (("touchStart", 0), *(("touchMove", -12 * k) for k in range(1, 11)), ("touchEnd", None)):
        points = [] if place is None else [{"x": x + place, "y": y - place}]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    assert [part[0] for part in handle.get_attribute("aria-valuetext").split(", ")] == ["−", "−"]
    assert page.evaluate("() => scrollY") == scrolled


def test_what_is_shown_is_what_is_computed(page):
    page.locator("#reset_query").click()
    page.locator("input[value=bma]").check()
    page.locator("#sink_kind").select_option("off-by-one")
    page.locator("#gate_matrix_01").fill("2")
    rows = [row.locator("td").all_inner_texts() for row in page.locator("#key_rows tr").all()]
    assert len(rows) == 6
    weights, shares = np.array([[number(row[1]), number(row[2])] for row in rows[:5]]).T
    sink = number(rows[5][2])
    assert abs(sum(weights) - 1) < 3e-3
    assert abs(sum(shares) + sink - 1) < 3e-3
    # Z / (Z + 1)
    partition = np.exp(number(page.locator("#log_partition").inner_text()))
    assert abs(1 - sink - partition / (partition + 1)) < 2e-3
    # The first position's own query is (0.5, 0.3): its gate on the second feature is sigmoid(0.5 · 2 + 0.3 · 1.5).
    assert abs(vector(rows[0][3])[1] - 1 / (1 + np.exp(-1.45))) < 6e-3
    assert page.locator("#query [data-when=bma] math").first.is_visible()
    assert not page.locator("#query div[data-when=bma-query]").is_visible()
    page.locator("#reset_query").click()
    assert page.locator("#key_rows tr:visible").count() == 5


# Curvature of a head's outputs


def surface_settings(rng, chart, reads, grain):
    """Return a random head with three features and a random gate, in the format of the page."""
    num_keys = 3 if chart == "weight" else 4
    head = {"query": rng.standard_normal(3)} | {name: rng.standard_normal((num_keys, 3)) for name in ("keys", "values")}
    gate = {"matrix": rng.standard_normal((3, 3 if grain == "element" else 1)), "strength": 1.7}
    return head | {"chart": chart}, gate | {"reads": reads}


def curvature_in_page(page, head, gate, points):
    given = {"head": plain(head), "gate": plain(gate), "points": points.tolist()}
    return page.evaluate(
        "({head, gate, points}) => points.map(([u, v]) => gaussianCurvature(surfaceJets(head, gate, u, v)))", given
    )


def as_layer(head, gate, grain):
    """Return the layer with these keys and values, and with this query at its last position."""
    num_keys = len(head["keys"])
    queries = np.zeros((num_keys, 3))
    queries[-1] = head["query"]
    # The input is the identity matrix, so that the projections equal the tensors.
    arrays = [torch.from_numpy(array)[None] for array in (queries, head["keys"], head["values"])]
    weight = torch.from_numpy(gate["strength"] * gate["matrix"])[None]
    return AttentionArrays(
        **dict(zip(("W_Q", "W_K", "W_V"), arrays, strict=True)),
        W_O=torch.zeros(1, 3, num_keys, dtype=torch.float64),
        gates=Gates.parse(Gate(site="output", reads=gate["reads"], grain=grain, activation="twosigmoid")),
        gate_parameters={"output": {"weight": weight}},
    ), torch.eye(num_keys, dtype=torch.float64)


@pytest.mark.parametrize("grain", ["element", "head"])
@pytest.mark.parametrize("reads", ["output", "query"])
@pytest.mark.parametrize("chart", ["weight", "query"])
def test_the_curvature_is_that_of_geometry(page, chart, reads, grain):
    rng = np.random.default_rng(4)
    head, gate = surface_settings(rng, chart, reads, grain)
    points = rng.dirichlet((1, 1, 1), size=20)[:, :2]
    layer, x = as_layer(head, gate, grain)
    if chart == "weight":
        expected = gaussian_curvature(weight_chart(layer, x, head=0), torch.from_numpy(points))
    else:
        at = torch.from_numpy(head["query"] + np.pad(points, ((0, 0), (0, 1))))
        u, v, _ = torch.eye(3, dtype=torch.float64)
        expected = sectional_curvature(query_chart(layer, x, head=0), at, u, v, tangent="plane")
    assert_same(curvature_in_page(page, head, gate, points), expected)


def test_curvature_is_zero_without_a_gate_and_nan_without_a_tangent_plane(page):
    rng = np.random.default_rng(5)
    head, gate = surface_settings(rng, "weight", "output", "element")
    points = rng.dirichlet((1, 1, 1), size=20)[:, :2]
    assert curvature_in_page(page, head, gate | {"strength": 0}, points) == [0] * 20
    head["values"][1] = head["values"][0]
    assert np.isnan(curvature_in_page(page, head, gate, points)).all()


def test_curvature_grows_with_the_strength_of_the_gate(page):
    strength = page.locator("#strength")
    page.locator("#surface_case").select_option("dome")
    strength.press("Home")
    assert page.locator("#surface_verdict").inner_text() == "Flat: K = 0 everywhere."
    strength.press("End")
    assert page.locator("#surface_verdict").inner_text() == "Curved like a dome: K > 0."
    for case, word in {"saddle": "saddle: K < 0", "cylinder": "K = 0", "plane": "K = 0", "query": "both signs"}.items():
        page.locator("#surface_case").select_option(case)
        assert word in page.locator("#surface_verdict").inner_text()
    page.locator("#surface_case").select_option("dome")


def test_the_surface_bends_at_once_for_those_who_want_no_motion(phone):
    phone.locator("#play_strength").click()
    assert phone.evaluate("() => document.getElementById('strength').valueAsNumber") == 3


# Build a gate

NAMES = (*CHOICES, *NUMBERS)
SIZES = (
    {"d_model": 512, "num_heads": 8, "num_kv_heads": 2},
    {"d_model": 96, "num_heads": 6, "num_kv_heads": 6},
    {"d_model": 100, "num_heads": 6, "num_kv_heads": 3, "head_dim": 10},
)
IN_PAGE = """(text) => {
    const [gates, sizes, fields] = JSON.parse(text);
    const table = JSON.parse(document.getElementById("gate_table").textContent);
    const list = listRefusals(table);
    const shapes = sizes.map((size) => headShape({ head_dim: null, ...size }).shape);
    const told = gates.map((values) => {
        const gate = Object.fromEntries(fields.map((name, k) => [name, values[k]]));
        const refusal = refusalOf(table, list, gate);
        if (refusal) return [refusal];
        const counts = shapes.map((shape) => {
            const { shapes, problem } = parameterShapes(gate, shape);
            return problem ?? numParameters(shapes);
        });
        return [nameGate(table, gate), spellGate(gate), needsSelfAttention(gate), counts];
    });
    return JSON.stringify(told);
}"""


def of_page(page, gates):
    """Return the page's results for gates, as JSON text, which transfers much faster than lists."""
    return json.loads(page.evaluate(IN_PAGE, json.dumps([gates, SIZES, NAMES])))


def of_library(values):
    """Return the library's results for a gate, in the page's format."""
    try:
        gate = Gate(**dict(zip(NAMES, values, strict=True)))
    except InputError as error:
        return [str(InputError(error.field, expected=error.expected, hint=error.hint))]
    return [str(gate), gate.spelling, gate.needs_self_attention, [count_or_problem(gate, sizes) for sizes in SIZES]]


def count_or_problem(gate, sizes):
    try:
        return gate.num_parameters(**sizes)
    except ValueError as problem:
        return str(problem)


def test_every_gate_on_offer_is_spelled_counted_or_rejected_as_by_the_library(page):
    words = list(product(*CHOICES.values()))
    gates = list(product(*CHOICES.values(), (None, 8), (None, 12), (None, 1)))
    numbers = list(product(*((None, *values) for values in NUMBERS.values())))
    gates += [(*chosen, *values) for chosen in random.Random(0).sample(words, 40) for values in numbers]
    found = of_page(page, gates)
    differing = [values for values, row in zip(gates, found, strict=True) if row != of_library(values)]
    assert differing == []
    assert 0 < sum(len(row) == 1 for row in found) < len(found)
    assert len(words) * 8 == 34_560


def test_the_cost_is_that_of_the_layer(page):
    spelled = ["bma", "g1", "value:query:shared-layer", "output:input:head:shared-group:r4", "dense:output:b1", "sink"]
    spelled += ["output:query:shared-group:w8", "output:nothing", "output:output:gelu:replace"]
    for sizes in SIZES:
        plain_layer = GatedAttention(**sizes, gate="none", device="meta")
        for name in spelled:
            gate = Gate.parse(name)
            fields = {field: getattr(gate, field) for field in NAMES}
            found = page.evaluate(
                """([gate, sizes]) => {
                    const { shape } = headShape({ head_dim: null, ...sizes });
                    const { shapes } = parameterShapes(gate, shape);
                    return [layerFlops(shape, 100), gateFlops(gate, shape, shapes), projectionSize(shape)];
                }""",
                [fields, sizes],
            )
            layer = GatedAttention(**sizes, gate=gate, device="meta")
            expected = plain_layer.flops_per_token(100)
            assert found == [expected, layer.flops_per_token(100) - expected, plain_layer.num_parameters()], name


@pytest.mark.parametrize(
    "sizes",
    [{"d_model": 100, "num_heads": 6, "num_kv_heads": 6}, {"d_model": 96, "num_heads": 6, "num_kv_heads": 4}],
)
def test_sizes_that_do_not_fit_have_the_error_of_the_library(page, sizes):
    with pytest.raises(InputError) as caught:
        HeadShape.of(**sizes)
    assert page.evaluate("sizes => headShape({ head_dim: null, ...sizes }).problem", sizes) == str(caught.value)


def test_the_code_to_paste_runs(page):
    page.locator("#gate_preset").select_option("bma")
    page.locator("#gate summary").click()
    for name, size in {"d_model": 32, "num_heads": 4, "num_kv_heads": 2}.items():
        page.locator(f"#{name}").fill(str(size))
    page.locator("#gate_activation").select_option("tanh1")
    torch_names, jax_names = {}, {}
    exec(page.locator("#code_torch").inner_text(), torch_names)
    # Only shapes, because compilation is slow.
    jax.eval_shape(lambda: exec(page.locator("#code_jax").inner_text(), jax_names))
    for names in (torch_names, jax_names):
        assert names["y"].shape == (2, 16, 32)
    assert str(torch_names["layer"].gates) == str(jax_names["config"].gates) == "value:query:tanh1"
    assert torch_names["layer"].shape == jax_names["config"].shape
    for name, size in {"d_model": 512, "num_heads": 8, "num_kv_heads": 8}.items():
        page.locator(f"#{name}").fill(str(size))
    page.locator("#gate summary").click()


def test_an_invalid_gate_is_explained_and_its_options_are_marked(page):
    page.locator("#gate_preset").select_option("bma")
    assert page.locator("#gate_parameters").inner_text() == "32,768"
    assert "✕" in page.locator("#gate_reads option[value=output]").inner_text()
    page.locator("#gate_reads").select_option("output")
    assert "value:input" in page.locator("#gate_refusal").inner_text()
    assert not page.locator("#gate_result").is_visible()
    assert not page.locator("#code_torch").is_visible()
    page.locator("#gate_site").select_option("output")
    assert not page.locator("#gate_refusal").is_visible()
    assert page.locator("#gate_spelling").inner_text() == "output:output"


# The page as a whole


def test_the_page_opens_offline_asks_for_nothing_and_complains_of_nothing(desktop, handheld):
    for opened in (desktop, handheld):
        assert opened.foreign_requests() == []
        assert opened.complaints == []


def test_the_policy_lets_nothing_be_fetched_and_no_other_script_run(path):
    text = path.read_text(encoding="utf-8")
    require_policy(text, num_scripts=text.count("<script>"))


@pytest.mark.parametrize("width", [320, 390, 700, 1280])
def test_nothing_is_wider_than_the_window(page, width):
    page.set_viewport_size(DESKTOP | {"width": width})
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    page.set_viewport_size(DESKTOP)


def test_every_control_has_a_name_and_a_mark_when_the_keyboard_reaches_it(page):
    page.locator("h1").click()
    reached = []
    while len(reached) < 200:
        page.keyboard.press("Tab")
        if (name_and_mark := page.evaluate(FOCUSED)) is None:
            break
        reached.append(name_and_mark)
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("input, select, button")]
            .filter((control) => !(control.labels?.length || control.ariaLabel || control.textContent.trim()))
            .map((control) => control.id)"""
    )
    assert unnamed == []
    assert [name for name, marked in reached if not marked] == []
    assert {name for name, _ in reached} >= {"Query of the attending position", "Key 1", "Value 5", "temperature"}


def test_light_and_dark_follow_the_reader_and_the_button(page, phone):
    paper = "() => getComputedStyle(document.body).backgroundColor"
    light, dark = page.evaluate(paper), phone.evaluate(paper)
    assert light != dark
    for color in (dark, light):
        page.locator("#toggle_theme").click()
        assert page.evaluate(paper) == color


def test_the_page_works_inside_a_frame(browser, path, tmp_path):
    outer = tmp_path / "outer.html"
    outer.write_text(f'<iframe src="{path.as_uri()}" width="800" height="600"></iframe>', encoding="utf-8")
    context = browser.new_context()
    page = context.new_page()
    page.goto(outer.as_uri())
    page.frame_locator("iframe").locator("#final_output", has_text="(").wait_for()
    context.close()
