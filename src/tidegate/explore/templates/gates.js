"use strict";
// A gate's spelling, parameters, cost and code, as in tidegate.Gate and the layers. Pure functions.
//
// A gate is { site, reads, grain, share, op, activation, rank, width, bias }; an omitted number is null. Python writes
// the table of invalid combinations, by calling Gate with each.

// The index in `reasons` of each combination, or -1 if it is valid.
const listRefusals = ({ refusals }) => refusals.flatMap(([reason, count]) => Array(count).fill(reason));

// The reason why a gate is invalid; empty if it is valid. `list` is the result of listRefusals.
function refusalOf(table, list, gate) {
  let place = 0;
  for (const [name, choices] of Object.entries(table.choices)) place = place * choices.length + choices.indexOf(gate[name]);
  for (const name of Object.keys(table.numbers)) place = 2 * place + (gate[name] === null ? 0 : 1);
  return list[place] < 0 ? "" : table.reasons[list[place]];
}

// The site, reads, and all fields that differ from their defaults.
function spellGate(gate) {
  const parts = [gate.site, gate.reads];
  if (gate.grain !== "element") parts.push(gate.grain);
  if (gate.activation !== "sigmoid") parts.push(gate.activation);
  if (gate.share !== "head") parts.push(`shared-${gate.share}`);
  if (gate.op !== "multiply") parts.push(gate.op);
  if (gate.rank !== null) parts.push(`r${gate.rank}`);
  if (gate.width !== null) parts.push(`w${gate.width}`);
  // A gate that reads nothing has a bias, which starts at 0 by default.
  if (gate.bias !== null && !(gate.reads === "nothing" && gate.bias === 0)) parts.push(`b${gate.bias}`);
  return parts.join(":");
}
const nameGate = (table, gate) => table.names[spellGate(gate)] ?? spellGate(gate);

const onSource = (gate) => ["key", "value"].includes(gate.site);
const hasMatrix = (gate) => !["partition", "nothing"].includes(gate.reads) && gate.op !== "replace";
const hasBias = (gate) => gate.bias !== null || gate.reads === "nothing";
const needsSelfAttention = (gate) => (onSource(gate) ? gate.reads === "query" : gate.reads === "value");

// The sizes of a layer, with the default head width, or the reason why they are invalid.
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

// The shape of each parameter by name, heads first, or the reason why the width is invalid.
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

// Multiplications and additions in the matrix products of one position, for the layer without the gate with `numKeys`
// keys, and for the gate. A shared matrix counts once per head, unless all heads read the same input.
const projectionSize = ({ d_model, num_heads, num_kv_heads, head_dim }) => 2 * d_model * head_dim * (num_heads + num_kv_heads);
const layerFlops = (shape, numKeys) => 2 * projectionSize(shape) + 4 * shape.num_heads * shape.head_dim * numKeys;
function gateFlops(gate, shape, { bias, ...matrices }) {
  const times = gate.reads === "input" ? 1 : headsAtSite(gate, shape) / numMatrices(gate, shape);
  return 2 * times * numParameters(matrices);
}

// Example code.
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
