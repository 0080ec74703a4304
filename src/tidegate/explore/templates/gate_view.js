"use strict";
// Part 3: a gate chosen field by field, drawn in its layer.
(() => {
  const table = JSON.parse(byId("gate_table").textContent);
  const refusals = listRefusals(table);
  const FIELDS = [...Object.keys(table.choices), ...Object.keys(table.numbers)];
  const SIZES = ["d_model", "num_heads", "num_kv_heads", "head_dim"];

  // Positions of the tensors in the diagram, and of a gate that acts on them.
  const RIGHT = 340;
  const TENSORS = { input: [150, 22], query: [60, 122], key: [150, 122], value: [240, 122], output: [150, 292], dense: [150, 452] };
  const SITES = { query: [60, 182], key: [150, 182], value: [240, 182], output: [150, 330], dense: [150, 412] };
  const LETTERS = { input: "X", query: "Q", key: "K", value: "V", output: "O", dense: "Y" };
  const MARKS = { multiply: "×", add: "+", replace: "=" };
  // Wires from the tensor that is read to the lane on the right.
  const LEAVES = {
    input: "M164 22H340",
    query: "M60 136V150H340",
    value: "M254 122H340",
    output: "M164 292H340",
    partition: "M172 232H340",
    nothing: "",
  };
  const svg = byId("gate_diagram");

  function drawLayer() {
    const wires = [
      "M150 36V48M60 57V48H240V57M150 48V57", "M60 83V108M150 83V108M240 83V108",
      "M60 136V215M150 136V215M240 136V270L164 290", "M105 249V268L138 285", "M150 306V359M150 385V438",
    ];
    for (const d of wires) draw(svg, "path", { class: "wire", d });
    const box = (x, y, width, height, text, subscript = "") => {
      draw(svg, "rect", { class: "box", x: x - width / 2, y: y - height / 2, width, height, rx: 5 });
      const label = draw(svg, "text", { x, y: y + 4 }, text);
      draw(label, "tspan", { class: "subscript", dy: 3 }, subscript);
    };
    for (const name of ["query", "key", "value"]) box(TENSORS[name][0], 70, 46, 26, "W", LETTERS[name]);
    box(105, 232, 134, 34, "A = softmax(S / T)");
    box(150, 372, 46, 26, "W", "O");
    for (const [name, [cx, cy]] of Object.entries(TENSORS)) {
      draw(svg, "circle", { class: "tensor", cx, cy, r: 14, "data-tensor": name });
      draw(svg, "text", { x: cx, y: cy + 4 }, LETTERS[name]);
    }
    const captions = { input: ["input", 128, "end"], output: ["attention output", 132, "end"], dense: ["layer's output", 132, "end"] };
    for (const [name, [text, x, anchor]] of Object.entries(captions)) {
      draw(svg, "text", { class: "caption", x, y: TENSORS[name][1] + 4, style: `text-anchor: ${anchor}` }, text);
    }
  }

  drawLayer();
  const gateGroup = draw(svg, "g", { class: "gate" });

  const inner = (gate) => {
    const bias = hasBias(gate) ? "b" : "";
    if (gate.op === "replace") return LETTERS[gate.reads];
    if (gate.reads === "nothing") return "b";
    const read = gate.reads === "partition" ? "log Z" : `${LETTERS[gate.reads]} W`;
    return bias ? `${read} + ${bias}` : read;
  };
  const shortName = { sigmoid: "σ", twosigmoid: "2σ", tanh1: "1+tanh", identity: "" };

  function drawGate(gate, refused) {
    gateGroup.replaceChildren();
    const [x, y] = SITES[gate.site];
    const leave = LEAVES[gate.reads];
    gateGroup.classList.toggle("refused", refused);
    if (leave) draw(gateGroup, "path", { class: "wire", d: `${leave}V${y - 15}` });
    draw(gateGroup, "path", { class: "wire", d: `M288 ${y}H${x + 10}` });
    draw(gateGroup, "rect", { class: "box", x: 288, y: y - 15, width: 104, height: 30, rx: 5 });
    draw(gateGroup, "text", { x: RIGHT, y: y + 4 }, `${shortName[gate.activation] ?? gate.activation}(${inner(gate)})`);
    draw(gateGroup, "circle", { class: "mark", cx: x, cy: y, r: 10 });
    draw(gateGroup, "text", { class: "sign", x, y: y + 5 }, refused ? "✕" : MARKS[gate.op]);
    for (const circle of svg.querySelectorAll(".tensor")) circle.classList.toggle("read", circle.dataset.tensor === gate.reads && !refused);
  }

  const PHRASES = {
    op: { multiply: ["Multiplies", "by"], add: ["Adds to", ""], replace: ["Replaces", "with"] },
    site: {
      output: "each head's attention output", value: "the value of each attended position", key: "the key of each attended position",
      query: "the query", dense: "the result of the output projection",
    },
    grain: { element: "one value per feature", head: "one value per head" },
    share: { head: "", group: " Heads of one key/value group share a matrix.", layer: " All heads share one matrix." },
  };
  function reading(gate) {
    if (gate.reads === "nothing") return "a trained constant";
    if (gate.reads === "partition") return "computed from the log partition function of the head (a sink in the softmax)";
    const whose = { input: "the layer's input", query: "query", value: "value", output: "attention output" }[gate.reads];
    const own = gate.reads === "input" ? whose : onSource(gate) ? `that position's own ${whose}` : gate.site === "dense" ? "all heads' attention output" : `the head's own ${whose}`;
    return `computed from ${own}`;
  }
  function describe(gate) {
    const [verb, by] = PHRASES.op[gate.op];
    const target = PHRASES.site[gate.site];
    if (gate.op === "replace") return `${verb} ${target} with its ${gate.activation}, a function without parameters.`;
    const where = needsSelfAttention(gate) ? " Works only in self-attention." : "";
    return `${verb} ${target}${by ? ` ${by}` : ""} ${PHRASES.grain[gate.grain]}, ${reading(gate)}.${PHRASES.share[gate.share]}${where}`;
  }

  const mi = (text) => `<mi>${text}</mi>`;
  const indices = (text) => `<mrow>${[...text].map(mi).join("")}</mrow>`;
  const above = (base, upper) => `<msup>${mi(base)}${indices(upper)}</msup>`;
  const mo = (text) => `<mo>${text}</mo>`;
  function formula(gate) {
    const position = onSource(gate) ? "j" : "i";
    const feature = gate.grain === "head" ? "" : gate.site === "dense" ? "m" : "a";
    const target = above(LETTERS[gate.site], gate.site === "dense" ? "im" : `${position}a`);
    const from = gate.reads === "input" ? "n" : "b";
    const matrix = feature ? `<msubsup>${mi("W")}${indices(from)}<mrow><mspace width="0.4em"></mspace>${mi(feature)}</mrow></msubsup>` : `<msub>${mi("W")}${indices(from)}</msub>`;
    const bias = hasBias(gate) ? (feature ? above("b", feature) : mi("b")) : "";
    const read = {
      partition: `<mi class="word">log</mi>${above("Z", "i")}`,
      nothing: "",
    }[gate.reads] ?? (gate.op === "replace" ? target : above(LETTERS[gate.reads], position + from) + matrix);
    const logit = read && bias ? read + mo("+") + bias : read || bias;
    const name = { sigmoid: mi("σ"), twosigmoid: `<mn>2</mn>${mi("σ")}`, tanh1: `<mn>1</mn>${mo("+")}<mi class="word">tanh</mi>`, identity: "" };
    const called = (name[gate.activation] ?? `<mi class="word">${gate.activation}</mi>`) + mo("(") + logit + mo(")");
    const factor = gate.activation === "tanh1" && gate.op === "multiply" ? mo("(") + called + mo(")") : called;
    const sign = { multiply: `${target}${mo("·")}`, add: `${target}${mo("+")}`, replace: "" }[gate.op];
    return `<math displaystyle="true">${target}${mo("→")}${sign}${factor}</math>`;
  }

  const chosenGate = () =>
    Object.fromEntries(
      FIELDS.map((name) => {
        const { value } = byId(`gate_${name}`);
        return [name, name in table.choices ? value : value === "" ? null : Number(value)];
      }),
    );
  const chosenSizes = () =>
    Object.fromEntries(SIZES.map((name) => [name, byId(name).value === "" && name === "head_dim" ? null : byId(name).valueAsNumber]));

  // Mark the options that are invalid with the other choices, except the chosen one, whose reason is shown.
  function markOptions(gate) {
    for (const name of FIELDS) {
      for (const option of byId(`gate_${name}`).options) {
        const value = name in table.choices ? option.value : option.value === "" ? null : Number(option.value);
        const refused = value !== gate[name] && refusalOf(table, refusals, { ...gate, [name]: value }) !== "";
        option.textContent = option.dataset.text + (refused ? " ✕ invalid" : "");
      }
    }
  }

  const percent = (share) => (share === 0 ? "0 %" : share < 0.0001 ? "< 0.01 %" : `${(100 * share).toFixed(share < 0.1 ? 2 : 1)} %`);
  const grouped = (number) => number.toLocaleString("en-US");

  function showCost(gate, shape, shapes) {
    const added = numParameters(shapes);
    const numKeys = byId("num_keys").valueAsNumber || 0;
    const names = Object.entries(shapes).map(([name, sizes]) => `${name} ${sizes.map(grouped).join(" × ")}`);
    byId("gate_parameters").textContent = grouped(added);
    byId("gate_shapes").textContent = names.join(", ") || "none";
    byId("gate_parameter_share").textContent = percent(added / projectionSize(shape));
    byId("gate_cost").textContent = percent(gateFlops(gate, shape, shapes) / layerFlops(shape, numKeys));
    const spelled = nameGate(table, gate);
    for (const framework of ["torch", "jax"]) byId(`code_${framework}`).textContent = codeFor(spelled, shape, framework);
  }

  function update() {
    const gate = chosenGate();
    const refusal = refusalOf(table, refusals, gate);
    const { shape, problem: wrongSizes } = headShape(chosenSizes());
    const { shapes, problem: wrongWidth } = shape && !refusal ? parameterShapes(gate, shape) : {};
    const problem = refusal || wrongSizes || wrongWidth || "";
    markOptions(gate);
    drawGate(gate, refusal !== "");
    const spelled = spellGate(gate);
    const name = nameGate(table, gate);
    byId("gate_preset").value = name === spelled ? "" : name;
    byId("gate_refusal").textContent = problem;
    byId("gate_refusal").hidden = problem === "";
    for (const id of ["gate_result", "gate_codes"]) byId(id).hidden = problem !== "";
    svg.setAttribute("aria-label", refusal || `Diagram of the layer. ${describe(gate)}`);
    if (refusal) return;
    byId("gate_spelling").textContent = spelled;
    byId("gate_named").textContent = name === spelled ? "" : `, named ${name}`;
    byId("gate_words").textContent = describe(gate);
    byId("gate_formula").innerHTML = formula(gate);
    if (!problem) showCost(gate, shape, shapes);
  }

  function fillSelects() {
    const add = (select, value, text) => {
      const option = new Option(text, value);
      option.dataset.text = text;
      select.add(option);
    };
    for (const [name, values] of Object.entries(table.choices)) values.forEach((value) => add(byId(`gate_${name}`), value, value));
    for (const [name, values] of Object.entries(table.numbers)) {
      add(byId(`gate_${name}`), "", "none");
      values.forEach((value) => add(byId(`gate_${name}`), value, shown(value, 0)));
    }
    add(byId("gate_preset"), "", "your own");
    for (const name of Object.keys(table.presets)) add(byId("gate_preset"), name, name);
  }

  function takePreset(name) {
    for (const [field, value] of Object.entries(table.presets[name])) byId(`gate_${field}`).value = value ?? "";
    update();
  }

  async function copyCode(button) {
    const code = byId(`code_${button.dataset.copy}`);
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {
      // Without access to the clipboard, select the text for the reader to copy.
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
    setTimeout(() => (button.textContent = "Copy"), 1200);
  }

  fillSelects();
  byId("gate_fields").addEventListener("input", update);
  byId("gate_preset").addEventListener("input", ({ target }) => target.value && takePreset(target.value));
  for (const button of document.querySelectorAll("[data-copy]")) button.addEventListener("click", () => copyCode(button));
  takePreset("bma");
})();
