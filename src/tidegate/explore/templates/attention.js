"use strict";
// The attention of one query among keys, as tidegate.tensors computes it. Pure functions of numbers and arrays.

const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);
const dot = (left, right) => sum(left.map((number, place) => number * right[place]));
const sigmoid = (z) => (z >= 0 ? 1 / (1 + Math.exp(-z)) : Math.exp(z) / (1 + Math.exp(z)));

// The row vector times the matrix: x^a W_a^b.
const times = (vector, matrix) => matrix[0].map((_, column) => dot(vector, matrix.map((row) => row[column])));

// S^j = q^a g_ab k^jb
const bilinearScores = (query, keys, metric) => keys.map((key) => dot(times(query, metric), key));

// A^j = exp(S^j / T) / Z, and log Z, without overflow.
function gibbs(scores, temperature) {
  const peak = Math.max(...scores);
  const factors = scores.map((score) => Math.exp((score - peak) / temperature));
  const total = sum(factors);
  return { weights: factors.map((factor) => factor / total), logPartition: peak / temperature + Math.log(total) };
}

// In nats; a weight of 0 contributes 0.
const entropyOf = (weights) => sum(weights.map((weight) => (weight > 0 ? -weight * Math.log(weight) : 0)));

const weightedSum = (weights, vectors) => vectors[0].map((_, a) => dot(weights, vectors.map((vector) => vector[a])));

// The attention of one query.
//
// query            : q^a, of the attending position
// keys, values     : k^ja and v^ja of the attended positions; `bma` also reads their queries
// metric           : g_ab
// gate, gateMatrix : "none", "bma" (g^j on each value, from that position's own query) or "bma-query" (g on the output)
// sink             : its logit s, or null for none
function attend({ query, keys, values, queries, metric, temperature, gate, gateMatrix, sink }) {
  const scores = bilinearScores(query, keys, metric);
  const { weights, logPartition } = gibbs(scores, temperature);
  const gateFrom = (read) => times(read, gateMatrix).map(sigmoid);
  const gates = gate === "bma" ? queries.map(gateFrom) : null;
  const gatedValues = gates ? values.map((value, j) => value.map((number, a) => number * gates[j][a])) : values;
  const queryGate = gate === "bma-query" ? gateFrom(query) : null;
  const kept = sink === null ? 1 : sigmoid(logPartition - sink);
  const output = weightedSum(weights, gatedValues).map((number, a) => number * kept * (queryGate ? queryGate[a] : 1));
  const entropy = entropyOf(weights);
  return {
    scores,
    weights,
    logPartition,
    freeEnergy: -temperature * logPartition,
    entropy,
    effectiveNumber: Math.exp(entropy),
    kept, // the total weight of the keys after the sink
    gates,
    queryGate,
    gatedValues,
    ungated: weightedSum(weights, values),
    output,
  };
}
