"use strict";
// Part 1: the planes of keys and of values, the numbers beside them, and the controls.
(() => {
  const START = {
    query: [1.1, 0.7],
    keys: [[1.7, 0.5], [0.4, 1.7], [-1.5, 0.9], [-0.9, -1.4], [1.2, -1.3]],
    queries: [[0.5, 0.3], [1.3, 1.1], [-0.5, 1.6], [-1.8, -0.5], [0.3, -0.9]],
    values: [[1.8, 0.4], [0.7, 1.9], [-1.3, 1.3], [-1.5, -1.0], [0.9, -1.7]],
    metric: [[0.71, 0], [0, 0.71]],
    gateMatrix: [[1.5, -1], [0.5, 1.5]],
    temperature: 1,
    sink: 1,
  };
  const EDGE = 2.3;
  const NUM_KEYS = START.keys.length;
  const state = structuredClone(START);
  const planes = { keys: byId("key_plane"), values: byId("value_plane") };
  const color = (j) => `var(--group-${j})`;
  const position = ([x, y]) => `translate(${x} ${-y})`;

  function drawAxes(svg, names) {
    for (const at of [-2, -1, 1, 2]) {
      draw(svg, "path", { class: "grid", d: `M${at} -2.5V2.5M-2.5 ${at}H2.5` });
    }
    draw(svg, "path", { class: "axis", d: "M0 -2.5V2.5M-2.5 0H2.5" });
    draw(svg, "text", { class: "tick", x: 1, y: 0.22 }, "1");
    draw(svg, "text", { class: "tick", x: 2.26, y: 0.22 }, names[0]);
    draw(svg, "text", { class: "tick", x: 0.24, y: -2.34 }, names[1]);
  }

  // A point that the pointer drags and the arrow keys move. `vector` is changed in place.
  function handle(svg, name, vector, shape) {
    const group = draw(svg, "g", { class: `handle ${shape}`, tabindex: 0, role: "slider", "aria-label": name });
    const about = { "aria-roledescription": "point in the plane", "aria-valuemin": -EDGE, "aria-valuemax": EDGE };
    for (const [key, value] of Object.entries(about)) group.setAttribute(key, value);
    draw(group, "circle", { class: "reach", r: 0.3 });
    const place = (x, y) => {
      vector.splice(0, 2, clamp(x, -EDGE, EDGE), clamp(y, -EDGE, EDGE));
      update();
    };
    onDrag(group, (x, y) => place(x, -y));
    // A finger on a point drags it; elsewhere in the plane it scrolls the page. Browsers ignore `touch-action` inside SVG.
    group.addEventListener("touchstart", (event) => event.preventDefault(), { passive: false });
    onArrowKeys(group, (right, up, larger) => {
      const step = larger ? 0.25 : 0.05;
      place(vector[0] + right * step, vector[1] + up * step);
    });
    const show = () => {
      group.setAttribute("transform", position(vector));
      group.setAttribute("aria-valuenow", vector[0].toFixed(2));
      group.setAttribute("aria-valuetext", `${shown(vector[0])} across, ${shown(vector[1])} up`);
    };
    return { group, show };
  }

  function arrow(svg, attributes) {
    return draw(svg, "path", { class: "arrow", ...attributes });
  }
  function pointArrow(path, [x, y]) {
    const length = Math.hypot(x, y);
    if (length < 0.02) return path.setAttribute("d", "");
    if (path.classList.contains("raw")) return path.setAttribute("d", `M0 0L${x} ${-y}`);
    const [ux, uy] = [x / length, y / length];
    const head = Math.min(0.18, length);
    const corner = (side) => `${x - head * ux + side * head * 0.55 * uy} ${-(y - head * uy - side * head * 0.55 * ux)}`;
    path.setAttribute("d", `M0 0L${x} ${-y}M${corner(1)}L${x} ${-y}L${corner(-1)}`);
  }

  drawAxes(planes.keys, ["a=1", "a=2"]);
  drawAxes(planes.values, ["a=1", "a=2"]);
  const rays = state.keys.map((_, j) => draw(planes.keys, "path", { class: "ray", stroke: color(j) }));
  const discs = state.keys.map((_, j) => draw(planes.keys, "circle", { class: "disc", fill: color(j) }));
  const ties = state.queries.map((_, j) => draw(planes.keys, "path", { class: "tie", stroke: color(j) }));
  const rawArrows = state.values.map((_, j) => arrow(planes.values, { class: "arrow raw", stroke: color(j) }));
  const valueArrows = state.values.map((_, j) => arrow(planes.values, { stroke: color(j) }));
  const ungatedArrow = arrow(planes.values, { class: "arrow ungated" });
  const outputArrow = arrow(planes.values, { class: "arrow output" });
  const outputName = draw(planes.values, "text", { class: "name output" }, "Y");

  const queryHandle = handle(planes.keys, "Query of the attending position", state.query, "query");
  draw(queryHandle.group, "rect", { class: "mark", x: -0.12, y: -0.12, width: 0.24, height: 0.24, transform: "rotate(45)" });
  draw(queryHandle.group, "text", { class: "name", x: 0.2, y: -0.16 }, "Q");
  const dots = (svg, what, vectors, radius, letter) =>
    vectors.map((vector, j) => {
      const made = handle(svg, `${what} ${j + 1}`, vector, "dot");
      made.group.style.setProperty("--color", color(j));
      draw(made.group, "circle", { class: "mark", r: radius });
      draw(made.group, "text", { class: "name", x: 0.14, y: -0.12 }, `${letter}${j + 1}`);
      return made;
    });
  const keyHandles = dots(planes.keys, "Key", state.keys, 0.08, "K");
  const ownHandles = dots(planes.keys, "Own query of position", state.queries, 0.05, "q");
  for (const { group } of ownHandles) group.classList.add("own");
  const valueHandles = dots(planes.values, "Value", state.values, 0.08, "V");
  const handles = [queryHandle, ...keyHandles, ...ownHandles, ...valueHandles];

  const rows = state.keys.map((_, j) => {
    const row = byId("key_rows").insertRow();
    const head = document.createElement("th");
    head.scope = "row";
    head.innerHTML = `<span class="swatch" style="background:${color(j)}"></span>${j + 1}`;
    row.append(head);
    return { cells: Array.from({ length: 4 }, () => row.insertCell()), row };
  });
  const sinkRow = byId("key_rows").insertRow();
  sinkRow.innerHTML = '<th scope="row">sink</th><td></td><td></td><td></td><td></td>';

  function settings() {
    const sinkKind = byId("sink_kind").value;
    return {
      ...state,
      temperature: 10 ** byId("temperature").valueAsNumber,
      metric: readMatrix("metric", 2, 2),
      gateMatrix: readMatrix("gate_matrix", 2, 2),
      gate: document.querySelector("input[name=gate]:checked").value,
      sink: { none: null, "off-by-one": 0, sink: byId("sink_logit").valueAsNumber }[sinkKind],
    };
  }

  const bar = (share) => `linear-gradient(to right, var(--band) ${100 * share}%, transparent ${100 * share}%)`;

  function showTable(set, found) {
    rows.forEach(({ cells }, j) => {
      const share = found.weights[j] * found.kept;
      const gate = found.gates?.[j] ?? found.queryGate;
      const texts = [shown(found.scores[j]), shown(found.weights[j], 3), shown(share, 3), gate ? shownVector(gate) : "1"];
      cells.forEach((cell, place) => (cell.textContent = texts[place]));
      cells[1].style.background = bar(found.weights[j]);
      cells[2].style.background = bar(share);
    });
    sinkRow.hidden = set.sink === null;
    if (set.sink !== null) {
      sinkRow.cells[1].textContent = shown(set.sink * set.temperature);
      sinkRow.cells[3].textContent = shown(1 - found.kept, 3);
      sinkRow.cells[3].style.background = bar(1 - found.kept);
    }
    byId("query_table").classList.toggle("with-sink", set.sink !== null);
  }

  function showNumbers(set, found) {
    const texts = {
      log_partition: shown(found.logPartition, 3),
      free_energy: shown(found.freeEnergy, 3),
      entropy: `${shown(found.entropy, 3)} nats of at most ${shown(Math.log(NUM_KEYS), 3)}`,
      effective_number: `${shown(found.effectiveNumber)} of ${NUM_KEYS}`,
      ungated_output: shownVector(found.ungated, 3),
      final_output: shownVector(found.output, 3),
      temperature_shown: shown(set.temperature),
      sink_shown: shown(set.sink ?? 0, 1),
    };
    for (const [id, text] of Object.entries(texts)) byId(id).textContent = text;
    byId("sink_field").hidden = byId("sink_kind").value !== "sink";
    for (const line of document.querySelectorAll("[data-when]")) {
      const wanted = line.dataset.when.split(" ");
      line.hidden = !(wanted.includes(set.gate) || (set.sink !== null && wanted.includes("sink")));
    }
  }

  function showPlanes(set, found) {
    rays.forEach((ray, j) => {
      const [[x, y], [kx, ky]] = [set.query, set.keys[j]];
      ray.setAttribute("d", `M${x} ${-y}L${kx} ${-ky}`);
      ray.setAttribute("stroke-opacity", 0.1 + 0.9 * found.weights[j]);
      discs[j].setAttribute("cx", kx);
      discs[j].setAttribute("cy", -ky);
      discs[j].setAttribute("r", 0.75 * Math.sqrt(found.weights[j] * found.kept));
      ties[j].setAttribute("d", `M${kx} ${-ky}L${set.queries[j][0]} ${-set.queries[j][1]}`);
      pointArrow(rawArrows[j], found.gates ? set.values[j] : [0, 0]);
      pointArrow(valueArrows[j], found.gatedValues[j]);
      valueArrows[j].setAttribute("stroke-opacity", 0.3 + 0.7 * found.weights[j]);
    });
    planes.keys.classList.toggle("with-own", set.gate === "bma");
    const changed = set.gate !== "none" || set.sink !== null;
    pointArrow(ungatedArrow, changed ? found.ungated : [0, 0]);
    pointArrow(outputArrow, found.output);
    const length = Math.hypot(...found.output) || 1;
    // Beside the tip, away from the arrow without the gate.
    const beside = [(0.1 * found.output[0] - 0.2 * found.output[1]) / length, (0.1 * found.output[1] + 0.2 * found.output[0]) / length];
    outputName.setAttribute("x", found.output[0] + beside[0]);
    outputName.setAttribute("y", -(found.output[1] + beside[1]) + 0.07);
    for (const { show } of handles) show();
  }

  function update() {
    const set = settings();
    const found = attend(set);
    showPlanes(set, found);
    showTable(set, found);
    showNumbers(set, found);
  }

  function reset() {
    for (const name of ["keys", "queries", "values"]) {
      state[name].forEach((vector, j) => vector.splice(0, 2, ...START[name][j]));
    }
    state.query.splice(0, 2, ...START.query);
    writeMatrix("metric", START.metric);
    writeMatrix("gate_matrix", START.gateMatrix);
    byId("temperature").value = Math.log10(START.temperature);
    byId("sink_kind").value = "none";
    byId("sink_logit").value = START.sink;
    document.querySelector("input[name=gate][value=none]").checked = true;
    update();
  }

  byId("query_controls").addEventListener("input", update);
  byId("reset_query").addEventListener("click", reset);
  reset();
})();
