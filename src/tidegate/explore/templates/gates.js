"use strict";
// A gate's spelling, parameters, cost and code, as tidegate.Gate and the layers have them. Pure functions.
//
// A gate is { site, reads, grain, share, op, activation, rank, width, bias }; a number that is left out is null. What is
// refused comes from the table that Python made by asking Gate for every combination.

// Each combination's place in `reasons`, or -1.
const listRefusals = ({ refusals }) => refusals.flatMap(([reason, count]) => Array(count).fill(reason));

// Why the gate is refused; empty if it is not. `list` is what listRefusals gave.
function refusalOf(table, list, gate) {
  let place = 0;
  for (const [name, choices] of Object.entries(table.choices)) place = place * choices.length + choices.indexOf(gate[name]);
  for (const name of Object.keys(table.numbers)) place = 2 * place + (gate[name] === null ? 0 : 1);
  return list[place] < 0 ? "" : table.reasons[list[place]];
}

// What differs from the defaults, after site:reads.
function spellGate(gate) {
  const parts = [gate.site, gate.reads];
  if (gate.grain !== "element") parts.push(gate.grain);
  if (gate.activation !== "sigmoid") parts.push(gate.activation);
  if (gate.share !== "head") parts.push(`shared-${gate.share}`);
  if (gate.op !== "multiply") parts.push(gate.op);
  if (gate.rank !== null) parts.push(`r${gate.rank}`);
  if (gate.width !== null) parts.push(`w${gate.width}`);
  // A gate that reads nothing is its bias, which starts at 0 unless it is given.
  if (gate.bias !== null && !(gate.reads === "nothing" && gate.bias === 0)) parts.push(`b${gate.bias}`);
  return parts.join(":");
}
const nameGate = (table, gate) => table.names[spellGate(gate)] ?? spellGate(gate);

const onSource = (gate) => ["key", "value"].includes(gate.site);
const hasMatrix = (gate) => !["partition", "nothing"].includes(gate.reads) && gate.op !== "replace";
const hasBias = (gate) => gate.bias !== null || gate.reads === "nothing";
const needsSelfAttention = (gate) => (onSource(gate) ? gate.reads === "query" : gate.reads === "value");

// The sizes of a layer, with the head width filled in, or why they do not fit.
function headShape({ d_model, num_heads, num_kv_heads, head_dim }) {
  const named = { d_model, num_heads, num_kv_heads, ...(head_dim === null ? {} : { head_dim }) };
  for (const [name, size] of Object.entries(named)) {
    if (!Number.isInteger(size) || size < 1) return { problem: `${name} must be a positive integer, got ${size}.` };
  }
  if (head_dim === null && d_model % num_heads) {
    return {
      problem:
        `d_model must be a multiple of num_heads=${num_heads} when head_dim is not given, got ${d_model}. ` +
        "Set head_dim, or change one of them.",
    };
  }
  if (num_heads % num_kv_heads) {
    return { problem: `num_kv_heads must be a divisor of num_heads=${num_heads}, got ${num_kv_heads}.` };
  }
  return { shape: { d_model, num_heads, num_kv_heads, head_dim: head_dim ?? d_model / num_heads } };
}

const headsAtSite = (gate, shape) => (gate.site === "dense" ? 1 : onSource(gate) ? shape.num_kv_heads : shape.num_heads);
const numMatrices = (gate, shape) => ({ head: headsAtSite(gate, shape), group: shape.num_kv_heads, layer: 1 })[gate.share];

function fullReadWidth(gate, { d_model, num_heads, num_kv_heads, head_dim }) {
  const group = num_heads / num_kv_heads;
  return {
    input: d_model,
    query: head_dim * (onSource(gate) ? group : 1),
    value: head_dim,
    output: head_dim * (gate.site === "dense" ? num_heads : 1),
    partition: 1,
    nothing: 0,
  }[gate.reads];
}

const gatedWidth = (gate, shape) => (gate.grain === "head" ? 1 : gate.site === "dense" ? shape.d_model : shape.head_dim);

// The shape of each parameter by name, heads first, or why the width does not fit.
function parameterShapes(gate, shape) {
  const full = fullReadWidth(gate, shape);
  if (gate.width !== null && gate.width > full) {
    return { problem: `Gate.width must be at most ${full}, the channels that ${gate.site}:${gate.reads} reads, got ${gate.width}.` };
  }
  const [matrices, read, gated] = [numMatrices(gate, shape), gate.width ?? full, gatedWidth(gate, shape)];
  const shapes = {};
  if (hasMatrix(gate) && gate.rank === null) shapes.weight = [matrices, read, gated];
  if (hasMatrix(gate) && gate.rank !== null) {
    shapes.weight_down = [matrices, read, gate.rank];
    shapes.weight_up = [matrices, gate.rank, gated];
  }
  if (hasBias(gate)) shapes.bias = [matrices, gated];
  return { shapes };
}

const sizeOf = (shape) => shape.reduce((product, size) => product * size, 1);
const numParameters = (shapes) => sum(Object.values(shapes).map(sizeOf));

// Multiplications and additions of one position's matrix products: of the layer without the gate when it attends to
// `numKeys` positions, and of the gate. Heads that share a matrix each use it, unless they read the same input.
const projectionSize = ({ d_model, num_heads, num_kv_heads, head_dim }) => 2 * d_model * head_dim * (num_heads + num_kv_heads);
const layerFlops = (shape, numKeys) => 2 * projectionSize(shape) + 4 * shape.num_heads * shape.head_dim * numKeys;
function gateFlops(gate, shape, { bias, ...matrices }) {
  const times = gate.reads === "input" ? 1 : headsAtSite(gate, shape) / numMatrices(gate, shape);
  return 2 * times * numParameters(matrices);
}

// Code to paste.
function codeFor(spelled, { d_model, num_heads, num_kv_heads, head_dim }, framework) {
  const more =
    (num_kv_heads === num_heads ? "" : `, num_kv_heads=${num_kv_heads}`) +
    (head_dim * num_heads === d_model ? "" : `, head_dim=${head_dim}`) +
    `, gate="${spelled}"`;
  if (framework === "torch") {
    return [
      "import torch",
      "from tidegate.torch import GatedAttention",
      "",
      `layer = GatedAttention(${d_model}, ${num_heads}${more})`,
      `x = torch.randn(2, 16, ${d_model})`,
      "y = layer(x)",
    ].join("\n");
  }
  return [
    "import jax",
    "from tidegate.flax import AttentionConfig, gated_attention, init_attention",
    "",
    `config = AttentionConfig(d_model=${d_model}, num_heads=${num_heads}${more})`,
    "params = init_attention(jax.random.key(0), config)",
    `x = jax.random.normal(jax.random.key(1), (2, 16, ${d_model}))`,
    "y = gated_attention(params, x, config)",
  ].join("\n");
}
