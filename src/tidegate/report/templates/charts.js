"use strict";
// Charts: drawn one after another, and again when the theme, the width or the medium changes.
const charts = (() => {
  const root = document.documentElement;
  const frame = document.querySelector(".frame");
  const config = { displayModeBar: false, displaylogo: false, responsive: false, doubleClick: "reset", showTips: false };
  const touch = matchMedia("(pointer: coarse)");
  const all = [...document.querySelectorAll(".chart")].map((element) => ({
    element,
    figure: JSON.parse(element.nextElementSibling.textContent),
    drawn: "",
  }));

  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);

  // Chart colors are CSS variables; plotly needs their values.
  function resolver() {
    const known = new Map();
    return (token) => {
      if (!known.has(token)) {
        probe.style.color = token;
        known.set(token, token === "var(--sans)" ? getComputedStyle(root).getPropertyValue("--sans") : getComputedStyle(probe).color);
      }
      return known.get(token);
    };
  }

  function colored(value, resolve) {
    if (typeof value === "string") return value.startsWith("var(--") ? resolve(value) : value;
    if (Array.isArray(value)) return value.map((item) => colored(item, resolve));
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([name, item]) => [name, colored(item, resolve)]));
  }

  const isDark = () => {
    probe.style.color = "light-dark(#000000, #ffffff)";
    return getComputedStyle(probe).color === "rgb(255, 255, 255)";
  };

  function draw(chart, resolve = resolver()) {
    const width = chart.element.clientWidth;
    if (!width) return;
    const state = `${width} ${isDark()}`;
    if (chart.drawn === state) return;
    const { data, layout, narrow } = colored(chart.figure, resolve);
    // Touching a chart scrolls the page.
    if (touch.matches) layout.dragmode = false;
    const fitted = { ...layout, ...(width < 520 ? narrow : {}), width };
    chart.element.style.height = `${fitted.height}px`;
    Plotly.react(chart.element, data, fitted, config);
    chart.drawn = state;
  }

  function drawAll() {
    const resolve = resolver();
    for (const chart of all) draw(chart, resolve);
  }

  // One chart at a time, so that the page stays responsive.
  function drawInTurn(place = 0) {
    if (place >= all.length) {
      root.dataset.charts = "drawn";
      return;
    }
    draw(all[place]);
    setTimeout(drawInTurn, 0, place + 1);
  }

  let waiting = 0;
  new ResizeObserver(() => {
    clearTimeout(waiting);
    waiting = setTimeout(drawAll, 120);
  }).observe(frame);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);

  function print(on) {
    if (on === "printing" in root.dataset) return;
    if (on) root.dataset.printing = "";
    else delete root.dataset.printing;
    drawAll();
  }
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));
  matchMedia("print").addEventListener("change", (event) => print(event.matches));

  for (const button of document.querySelectorAll("[data-save-chart]")) {
    button.addEventListener("click", () => {
      const figure = button.closest("figure");
      const element = figure.querySelector(".chart");
      const filename = figure.querySelector("h3").textContent.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 60);
      Plotly.downloadImage(element, { format: "svg", filename, width: element.clientWidth, height: element.clientHeight });
    });
  }

  drawInTurn();
  return { drawAll, figureOf: (element) => all.find((chart) => chart.element === element).figure };
})();
