// What was recorded beside a token, in words: its kept set, the experts of each layer, and alternatives. Pure: no DOM.
import { number } from "../../../lib/format.js";
import { escaped } from "./token_text.js";

/** Degrees between the hues of two consecutive experts: neighbours differ, and few of the first hundred are alike. */
const GOLDEN = 137.508;
const SHOWN = 8;

/** "kept 37 of 151,936 (mass 0.93)". `row`: of `kept`; `size`: of the vocabulary, null if it is not known. */
export function keptWords(row, size) {
  const count = row.excluded ? `all but ${number(row.number)}` : number(row.number);
  const of = size === null ? "" : ` of ${number(size)}`;
  return `kept ${count}${of} (${row.mass === null ? "mass not known" : `mass ${mass(row.mass)}`})`;
}

/** A probability with two digits, and with more where it would round to 1. */
export function mass(value) {
  if (value >= 0.995 && value < 1) return value > 0.99995 ? "almost 1" : String(Number(value.toPrecision(4)));
  return String(Number(value.toPrecision(2)));
}

/** The likeliest ids of a set: {texts: [quoted texts, or "#id" without one], more: how many others there are}. */
export function listed(row) {
  const texts = row.ids.slice(0, SHOWN).map((id, at) => quoted(row.texts[at], id));
  return { texts, more: row.number - texts.length };
}

/** A text as a JSON string in which nothing is hidden; "#id" without one. */
export const quoted = (text, id) => (text === null ? `#${id}` : escaped(text));

/** The experts of a token by layer: "layer 0: 5 17 · layer 1: 3 –". */
export const expertWords = (layers) => layers.map((experts, at) => layerWords(experts, at)).join(" · ");

/** The experts of one layer: "layer 0: 5 17". A missing one is a dash. */
export const layerWords = (experts, at) => `layer ${at}: ${experts.map((expert) => expert ?? "–").join(" ")}`;

/** The hue of an expert in degrees, the same in each layer and each token. */
export const hueOf = (expert) => Math.round((expert * GOLDEN) % 360);

/** Why a token has no experts. */
export const withoutExperts = (at, count) => (at === count - 1 ? "none yet: no forward pass has taken in the last token" : "missing");
