// The lines and the node of one row of the tree, as SVG. Each kind of node has a shape of its own, not a colour alone.
import { html } from "../../../lib/html.js";
import { isFork, isUnaligned } from "./tree_words.js";

export const ROW = 28; // pixels: the height of a row
const LANE = 14, EDGE = 11, MIDDLE = ROW / 2, COLOURS = 8;

const x = (lane) => EDGE + lane * LANE;
const colour = (lane) => `lane-${(lane % COLOURS) + 1}`;

/** The width of the drawing, for all rows alike. */
export const graphWidth = (lanes) => x(Math.max(0, lanes - 1)) + EDGE;

/** `row`: of `layOut`; `height`: of the row, with what is opened below it. */
export function TreeGraph({ row, lanes, height }) {
  const { lane, node } = row;
  const broken = isUnaligned(node) ? "broken" : "";
  return html`<svg class="tree-graph" width=${graphWidth(lanes)} height=${height} aria-hidden="true">
    ${Array.from({ length: lane }, (_, each) => line(each, 0, height))}
    ${row.side && html`<path class=${`edge ${colour(lane)} ${broken}`} d=${bend(lane)} />`}
    ${row.up && line(lane, 0, MIDDLE, broken)} ${row.down && line(lane, MIDDLE, height)}
    ${shape(node, x(lane), colour(lane))}
  </svg>`;
}

/**
 * A dotted line from a fork to the turn that it is nearest to, left of all lanes. `from`, `to`: {lane, y} of both, with y
 * in pixels from the top of the list.
 */
export function NearestLine({ from, to }) {
  const [high, low] = from.y < to.y ? [from, to] : [to, from];
  const height = low.y - high.y, edge = 3;
  const path = `M ${x(high.lane) - 6} 0 Q ${edge} 0 ${edge} 8 V ${height - 8} Q ${edge} ${height} ${x(low.lane) - 7} ${height}`;
  return html`<svg class="tree-nearest" width=${x(Math.max(from.lane, to.lane))} height=${height + 2} aria-hidden="true"
    style=${{ top: `${high.y}px` }}><path d=${path} /></svg>`;
}

const line = (lane, from, to, broken = "") =>
  html`<line class=${`edge ${colour(lane)} ${broken}`} x1=${x(lane)} x2=${x(lane)} y1=${from} y2=${to} />`;

/** From the line of the lane to the left into the node. */
const bend = (lane) => `M ${x(lane - 1)} 0 Q ${x(lane - 1)} ${MIDDLE} ${x(lane)} ${MIDDLE}`;

const KNOWN = ["complete", "running", "failed", "aborted", "superseded", "begun"];

function shape(node, at, lane) {
  const kind = KNOWN.includes(node.status) ? node.status : "complete";
  const name = `node ${kind} ${lane} ${node.trainable === false ? "untrained" : ""}`;
  const [left, top, right, bottom] = [at - 4, MIDDLE - 4, at + 4, MIDDLE + 4];
  const crossed = `M ${left} ${top} L ${right} ${bottom} M ${right} ${top} L ${left} ${bottom}`;
  if (kind === "failed") return html`<path class=${name} d=${crossed} />`;
  if (kind === "aborted") return html`<rect class=${name} x=${left} y=${top} width="8" height="8" />`;
  if (kind === "running") {
    return html`<g class=${name}><circle cx=${at} cy=${MIDDLE} r="5" /><path d=${half(at)} /></g>`;
  }
  if (kind === "complete" && isFork(node)) return html`<path class=${name} d=${diamond(at)} />`;
  return html`<circle class=${name} cx=${at} cy=${MIDDLE} r=${kind === "complete" ? 4.5 : 4} />`;
}

const diamond = (at) => `M ${at} ${MIDDLE - 6} l 6 6 -6 6 -6 -6 z`;
const half = (at) => `M ${at} ${MIDDLE - 5} a 5 5 0 0 1 0 10 z`;
