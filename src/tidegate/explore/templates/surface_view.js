"use strict";
// Part 2: the surface, rotated by pointer and keys, curved by the strength of the gate, colored by its curvature.
(() => {
  const UNIT = [[1, 0, 0], [0, 1, 0], [0, 0, 1]];
  const weightHead = { chart: "weight", query: [0.6, -0.4, 0.8], keys: UNIT, values: UNIT };
  const queryHead = {
    chart: "query",
    query: [0, 0, 0.3],
    keys: [[1.6, 0, 0.2], [-0.8, 1.4, 0.2], [-0.8, -1.4, 0.2], [0, 0, 1.2]],
    values: [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0.9, 0.9, 0.9]],
  };
  const scaled = (matrix, factor) => matrix.map((row) => row.map((number) => number * factor));
  // The options of the page, which describes each.
  const CASES = {
    dome: { head: weightHead, reads: "output", matrix: scaled(UNIT, -0.34) },
    saddle: { head: weightHead, reads: "output", matrix: [[0, 1.2, 0], [1.2, 0, 0], [0, 0, 0]] },
    cylinder: { head: weightHead, reads: "output", matrix: [[1.2], [-1], [0.4]] },
    plane: { head: weightHead, reads: "query", matrix: scaled(UNIT, 0.5) },
    query: { head: queryHead, reads: "query", matrix: [[0.4, 0, -0.3], [0, 0.4, 0.3], [0, 0, 0]] },
  };
  const STRONGEST = 3;
  const ROWS = 16;
  const LEVELS = 16;
  const SHADES = 6;

  // The grid of coordinates and its faces: a triangle for weights, which add up to at most 1, a square for queries.
  function mesh(chart) {
    const points = [];
    const place = new Map();
    const inside = (i, j) => chart === "query" || i + j <= ROWS;
    for (let i = 0; i <= ROWS; i++) {
      for (let j = 0; j <= ROWS; j++) {
        if (!inside(i, j)) continue;
        place.set(`${i} ${j}`, points.length);
        points.push(chart === "query" ? [-1.5 + (3 * i) / ROWS, -1.5 + (3 * j) / ROWS] : [i / ROWS, j / ROWS]);
      }
    }
    const at = (i, j) => place.get(`${i} ${j}`);
    const faces = [];
    for (let i = 0; i < ROWS; i++) {
      for (let j = 0; j < ROWS; j++) {
        if (inside(i + 1, j + 1)) faces.push([at(i, j), at(i + 1, j), at(i + 1, j + 1), at(i, j + 1)]);
        else if (inside(i + 1, j)) faces.push([at(i, j), at(i + 1, j), at(i, j + 1)]);
      }
    }
    const steps = Array.from({ length: ROWS }, (_, k) => k);
    const border = [
      ...steps.map((k) => at(k, 0)),
      ...steps.map((k) => (chart === "query" ? at(ROWS, k) : at(ROWS - k, k))),
      ...(chart === "query" ? steps.map((k) => at(ROWS - k, ROWS)) : []),
      ...steps.map((k) => at(0, ROWS - k)),
    ];
    return { points, faces, border };
  }

  function compute({ head, reads, matrix }, points, strength) {
    const jets = points.map(([u, v]) => surfaceJets(head, { reads, matrix, strength }, u, v));
    return { places: jets.map((point) => point.map((jet) => jet[0])), curvatures: jets.map(gaussianCurvature) };
  }

  const mean = (numbers) => sum(numbers) / numbers.length;
  const sorted = (numbers) => [...numbers].sort((left, right) => left - right);
  const quantile = (numbers, share) => numbers[Math.round(share * (numbers.length - 1))];

  // The color scale covers 90 % of the curvatures at zero and full strength, and is the same at every strength.
  function frameOf(chosen, points) {
    const [flat, bent] = [0, STRONGEST].map((strength) => compute(chosen, points, strength));
    const sizes = sorted([...flat.curvatures, ...bent.curvatures].map(Math.abs));
    const places = [...flat.places, ...bent.places];
    const center = [0, 1, 2].map((a) => mean(places.map((place) => place[a])));
    const distance = (place) => Math.hypot(...place.map((x, a) => x - center[a]));
    const reach = Math.max(...[...places, ...UNIT, [0, 0, 0]].map(distance));
    const limit = quantile(sizes, 0.9);
    return { flat, center, reach, limit: limit > 1e-9 ? Number(limit.toPrecision(1)) : 1 };
  }

  const svg = byId("surface_picture");
  const axes = draw(svg, "g", { class: "axes" });
  const ghost = draw(svg, "path", { class: "ghost" });
  const faceGroup = draw(svg, "g", { class: "faces" });
  const names = draw(svg, "g", { class: "axes" });
  const view = { turn: 0.1, tilt: 0.3 };
  let current = null;

  const fills = Array.from({ length: 2 * LEVELS + 1 }, (_, level) => {
    const share = (level - LEVELS) / LEVELS;
    const [near, far] = share < 0 ? [1, 0] : [3, 4];
    const size = Math.abs(share);
    return size < 0.5
      ? `color-mix(in oklab, var(--diverging-${near}) ${200 * size}%, var(--diverging-2))`
      : `color-mix(in oklab, var(--diverging-${far}) ${200 * size - 100}%, var(--diverging-${near}))`;
  });
  const fillOf = (curvature, limit) => fills[Math.round(clamp(curvature / limit, -1, 1) * LEVELS) + LEVELS] ?? "var(--soft)";

  // From the space of outputs to the picture: across, down, and towards the viewer.
  function projection({ center, reach }) {
    const [ct, st, cp, sp] = [Math.cos(view.turn), Math.sin(view.turn), Math.cos(view.tilt), Math.sin(view.tilt)];
    return (place) => {
      const [x, y, z] = place.map((number, a) => (number - center[a]) / reach);
      const towards = x * ct + y * st;
      return [y * ct - x * st, towards * sp - z * cp, towards * cp + z * sp];
    };
  }

  function drawAxesOf(project) {
    axes.replaceChildren();
    names.replaceChildren();
    UNIT.forEach((direction, a) => {
      const [[x0, y0], [x1, y1]] = [project([0, 0, 0]), project(direction)];
      draw(axes, "path", { d: `M${x0} ${y0}L${x1} ${y1}` });
      draw(names, "text", { x: x1 + 0.1 * (x1 - x0), y: y1 + 0.1 * (y1 - y0) + 0.02 }, `Y${"¹²³"[a]}`);
    });
  }

  const pathThrough = (project, places, corners) =>
    `M${corners.map((corner) => project(places[corner]).slice(0, 2).join(" ")).join("L")}Z`;

  // From 0 for a face towards the light to 1 for a face parallel to it.
  function shadeOf([first, second, third]) {
    const normal = cross(second.map((x, a) => x - first[a]), third.map((x, a) => x - first[a]));
    const [x, y, z] = normal.map((number) => number / (Math.hypot(...normal) || 1));
    return 1 - Math.abs(0.35 * x - 0.45 * y + 0.82 * z);
  }

  function paint() {
    const { frame, faces, found } = current;
    const project = projection(frame);
    drawAxesOf(project);
    ghost.setAttribute("d", pathThrough(project, frame.flat.places, current.border));
    const seen = found.places.map(project);
    const order = faces
      .map((face, place) => ({ face, place, depth: mean(face.map((corner) => seen[corner][2])) }))
      .sort((left, right) => left.depth - right.depth);
    while (faceGroup.childElementCount < faces.length) draw(faceGroup, "polygon");
    while (faceGroup.childElementCount > faces.length) faceGroup.lastChild.remove();
    order.forEach(({ face, place }, k) => {
      const polygon = faceGroup.children[k];
      polygon.setAttribute("points", face.map((corner) => seen[corner].slice(0, 2).join(",")).join(" "));
      const shade = Math.round(SHADES * shadeOf(face.map((corner) => seen[corner])));
      polygon.style.fill = `color-mix(in oklab, ${current.colors[place]}, var(--shade) ${5 * shade}%)`;
    });
  }

  function showNumbers(strength) {
    const { found, frame } = current;
    const curvatures = sorted(found.curvatures.filter(Number.isFinite));
    const [low, middle, high] = [0, 0.5, 1].map((share) => quantile(curvatures, share));
    const flat = Math.max(-low, high) * frame.reach ** 2 < 1e-9;
    byId("strength_shown").textContent = shown(strength);
    byId("lowest_curvature").textContent = flat ? "0" : shown(low, 3);
    byId("median_curvature").textContent = flat ? "0" : shown(middle, 3);
    byId("highest_curvature").textContent = flat ? "0" : shown(high, 3);
    const say = flat ? "Flat: K = 0 everywhere." : low >= 0 ? "Curved like a dome: K > 0." : high <= 0 ? "Curved like a saddle: K < 0." : "Curved, with both signs of K.";
    // Screen readers announce only changes.
    if (byId("surface_verdict").textContent !== say) byId("surface_verdict").textContent = say;
    svg.setAttribute("aria-label", `Surface of the outputs at gate strength ${shown(strength)}. ${say} Arrow keys rotate it.`);
  }

  function update() {
    const strength = byId("strength").valueAsNumber;
    current.found = compute(current.chosen, current.points, strength);
    const { curvatures } = current.found;
    current.colors = current.faces.map((face) => fillOf(mean(face.map((corner) => curvatures[corner])), current.frame.limit));
    showNumbers(strength);
    paint();
  }

  function choose() {
    const name = byId("surface_case").value;
    const chosen = CASES[name];
    const grid = mesh(chosen.head.chart);
    const frame = frameOf(chosen, grid.points);
    current = { chosen, ...grid, frame };
    byId("legend_low").textContent = `−${frame.limit}`;
    byId("legend_high").textContent = `+${frame.limit}`;
    for (const text of document.querySelectorAll("[data-case]")) text.hidden = !text.dataset.case.split(" ").includes(name);
    update();
  }

  // From zero to full strength in two seconds, or at once with reduced motion.
  let playing = 0;
  function play() {
    cancelAnimationFrame(playing);
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const begun = performance.now();
    const step = (now) => {
      const share = still ? 1 : clamp((now - begun) / 2000, 0, 1);
      byId("strength").value = STRONGEST * share;
      update();
      if (share < 1) playing = requestAnimationFrame(step);
    };
    step(begun);
  }

  const turn = (right, up) => {
    view.turn -= right;
    view.tilt = clamp(view.tilt + up, -1.5, 1.5);
    paint();
  };
  onDrag(svg, (x, y, dx, dy) => turn(dx / 150, dy / 150));
  onArrowKeys(svg, (right, up, larger) => turn(right * (larger ? 0.4 : 0.1), -up * (larger ? 0.4 : 0.1)));
  byId("strength").addEventListener("input", () => {
    cancelAnimationFrame(playing);
    update();
  });
  byId("surface_case").addEventListener("input", choose);
  byId("play_strength").addEventListener("click", play);
  choose();
})();
