"use strict";
// Shared by the parts of the page: SVG elements, numbers as text, points that are dragged or moved by keys.

const SVG = "http://www.w3.org/2000/svg";
const byId = (id) => document.getElementById(id);

// Add an SVG element with attributes to its parent.
function draw(parent, name, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  parent.append(element);
  return element;
}

// A number as text, with a typographic minus and without -0.00.
function shown(number, digits = 2) {
  const text = Math.abs(number).toFixed(digits);
  return number < 0 && Number(text) !== 0 ? `−${text}` : text;
}
const shownVector = (vector, digits = 2) => `(${vector.map((number) => shown(number, digits)).join(", ")})`;

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };

// Call `move(right, up, larger)` for each arrow key that is pressed on the element; Shift asks for larger steps.
function onArrowKeys(element, move) {
  element.addEventListener("keydown", (event) => {
    const step = ARROWS[event.key];
    if (!step || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    move(...step, event.shiftKey);
  });
}

// Call `move(x, y, dx, dy)` while the element is dragged, with the pointer's position in SVG coordinates and its
// movement in pixels.
function onDrag(element, move) {
  const svg = element.ownerSVGElement ?? element;
  element.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    element.setPointerCapture(event.pointerId);
    let [lastX, lastY] = [event.clientX, event.clientY];
    const follow = ({ clientX, clientY }) => {
      const at = new DOMPoint(clientX, clientY).matrixTransform(svg.getScreenCTM().inverse());
      move(at.x, at.y, clientX - lastX, clientY - lastY);
      [lastX, lastY] = [clientX, clientY];
    };
    const end = () => {
      element.removeEventListener("pointermove", follow);
      for (const name of ["pointerup", "pointercancel"]) element.removeEventListener(name, end);
    };
    element.addEventListener("pointermove", follow);
    for (const name of ["pointerup", "pointercancel"]) element.addEventListener(name, end);
  });
}

const clamp = (number, low, high) => Math.min(high, Math.max(low, number));

// The numbers of a matrix whose inputs have ids such as `metric_01`; anything else than a number counts as 0.
const readMatrix = (name, rows, columns) =>
  Array.from({ length: rows }, (_, a) => Array.from({ length: columns }, (_, b) => byId(`${name}_${a}${b}`).valueAsNumber || 0));

function writeMatrix(name, matrix) {
  matrix.forEach((row, a) => row.forEach((number, b) => (byId(`${name}_${a}${b}`).value = number)));
}

byId("toggle_theme").addEventListener("click", toggleTheme);
