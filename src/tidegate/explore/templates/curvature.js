"use strict";
// The surface of one attention head's outputs over two coordinates, and its Gaussian curvature. Pure functions.
//
// A jet is a function of two coordinates u and v at a point, with its first and second derivatives:
// [f, f_u, f_v, f_uu, f_uv, f_vv]. Sums, products and functions of jets are exact, without a step size.

const constantJet = (number) => [number, 0, 0, 0, 0, 0];
const addJets = (f, g) => f.map((number, place) => number + g[place]);
const scaleJet = (f, factor) => f.map((number) => number * factor);
const sumJets = (jets) => jets.reduce(addJets);

const multiplyJets = ([f, fu, fv, fuu, fuv, fvv], [g, gu, gv, guu, guv, gvv]) => [
  f * g,
  fu * g + f * gu,
  fv * g + f * gv,
  fuu * g + 2 * fu * gu + f * guu,
  fuv * g + fu * gv + fv * gu + f * guv,
  fvv * g + 2 * fv * gv + f * gvv,
];

// A function of a jet, from the function's value and first two derivatives.
const applyToJet = ([, fu, fv, fuu, fuv, fvv], value, first, second) => [
  value,
  first * fu,
  first * fv,
  first * fuu + second * fu * fu,
  first * fuv + second * fu * fv,
  first * fvv + second * fv * fv,
];
const expJet = (f) => applyToJet(f, Math.exp(f[0]), Math.exp(f[0]), Math.exp(f[0]));
const reciprocalJet = (f) => applyToJet(f, 1 / f[0], -1 / f[0] ** 2, 2 / f[0] ** 3);
// 2 σ(f), which is exactly 1 at f = 0.
function twoSigmoidJet(f) {
  const p = sigmoid(f[0]);
  return applyToJet(f, 2 * p, 2 * p * (1 - p), 2 * p * (1 - p) * (1 - 2 * p));
}

// Jets times a matrix of numbers: x^a W_a^b.
const jetsTimes = (jets, matrix) => matrix[0].map((_, b) => sumJets(jets.map((jet, a) => scaleJet(jet, matrix[a][b]))));

// The query and the weights of the head as jets.
//
// weight chart : u and v are the weights of the first two of three keys, the third has the rest; the query is fixed
// query chart  : u and v move the query along its first two components; the keys are fixed
function moveHead({ chart, query, keys }, u, v) {
  const [first, second] = [[u, 1, 0, 0, 0, 0], [v, 0, 1, 0, 0, 0]];
  if (chart === "weight") {
    const rest = addJets(constantJet(1), scaleJet(addJets(first, second), -1));
    return { query: query.map(constantJet), weights: [first, second, rest] };
  }
  const moved = [addJets(constantJet(query[0]), first), addJets(constantJet(query[1]), second), ...query.slice(2).map(constantJet)];
  const scores = keys.map((key) => sumJets(moved.map((jet, a) => scaleJet(jet, key[a] / Math.sqrt(query.length)))));
  const peak = Math.max(...scores.map((score) => score[0]));
  const factors = scores.map((score) => expJet(addJets(score, constantJet(-peak))));
  const shrink = reciprocalJet(sumJets(factors));
  return { query: moved, weights: factors.map((factor) => multiplyJets(factor, shrink)) };
}

// The head's gated output at (u, v), a jet for each feature: y = o ⊙ 2σ(strength · r W), where the gate reads r.
//
// head  : chart, query, keys, values
// reads : "output" or "query"
// W     : one column for each feature, or one for all of them
function surfaceJets(head, { reads, matrix, strength }, u, v) {
  const { query, weights } = moveHead(head, u, v);
  const output = head.values[0].map((_, a) => sumJets(weights.map((weight, j) => scaleJet(weight, head.values[j][a]))));
  const logits = jetsTimes(reads === "output" ? output : query, matrix);
  const gates = logits.map((logit) => twoSigmoidJet(scaleJet(logit, strength)));
  return output.map((jet, a) => multiplyJets(jet, gates[gates.length === 1 ? 0 : a]));
}

const cross = ([a, b, c], [x, y, z]) => [b * z - c * y, c * x - a * z, a * y - b * x];

// Gauss: K = (L N − M²) / (E G − F²), the determinants of the second and the first fundamental form. Three features.
// nan at a point where the surface has no tangent plane.
function gaussianCurvature(jets) {
  const [, fu, fv, fuu, fuv, fvv] = jets[0].map((_, place) => jets.map((jet) => jet[place]));
  const normal = cross(fu, fv);
  // |normal|² is E G − F².
  const area = dot(normal, normal);
  if (area <= 1e-20 * dot(fu, fu) * dot(fv, fv) || area === 0) return NaN;
  const [L, M, N] = [fuu, fuv, fvv].map((second) => dot(second, normal));
  return (L * N - M * M) / area ** 2;
}
