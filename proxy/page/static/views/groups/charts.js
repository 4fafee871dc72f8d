// Drawings of distributions: small ones in rows, and histograms. What they show is also in their names, for screen readers.
import { compact, number, plural, reward } from "../../lib/format.js";
import { html } from "../../lib/html.js";
import { bins, partsOf, rangeOf, share, thinned } from "./distribution.js";

const NAMED = 12;
const POINTS = 60;

/** Numbers in words: all if they are few, else how many and their range. */
export function inWords(values) {
  if (values.length === 0) return "none";
  if (values.length <= NAMED) return values.map(reward).join(", ");
  const [low, high] = rangeOf(values);
  return `${number(values.length)} from ${reward(low)} to ${reward(high)}`;
}

/** A histogram in a row of a table. `range`: of all rows, so that rows can be compared. */
export function SmallHistogram({ values, range, mean, label, width = 132, height = 18 }) {
  if (values.length === 0) return html`<span class="quiet">–</span>`;
  const found = partsOf(values, range, 22);
  const most = Math.max(...found);
  const step = width / found.length;
  const text = `${label}: ${inWords(values)}`;
  return html`<svg class="groups-small" width=${width} height=${height} role="img" aria-label=${text}><title>${text}</title>
    <line class="groups-base" x1="0" x2=${width} y1=${height - 0.5} y2=${height - 0.5} />
    ${found.map((count, index) => count > 0 && html`<rect key=${index} class="groups-bar" x=${index * step + 0.5} width=${Math.max(2, step - 1)}
      y=${height - Math.max(3, (count / most) * height)} height=${Math.max(3, (count / most) * height)} />`)}
    <line class="groups-mean" x1=${at(mean, range, width)} x2=${at(mean, range, width)} y1="0" y2=${height} />
  </svg>`;
}

/** Numbers in their order as a line. `range`: that of all rows. */
export function Sparkline({ values, range, label, width = 120, height = 18 }) {
  if (values.length === 0) return html`<span class="quiet">–</span>`;
  const seen = thinned(values, POINTS);
  const text = `${label}: ${inWords(values)}`;
  const points = seen.map((value, index) => [at(index, [0, seen.length - 1], width - 6) + 3, height - 3 - share(value, range) * (height - 6)]);
  const [x, y] = points.at(-1);
  return html`<svg class="groups-small" width=${width} height=${height} role="img" aria-label=${text}><title>${text}</title>
    <polyline class="groups-line" points=${points.map((point) => point.map((value) => value.toFixed(1)).join(",")).join(" ")} />
    <circle class="groups-dot" cx=${x} cy=${y} r="2.2" />
  </svg>`;
}

/** A card with a histogram. `unit`: what is counted, "session". `found`: the spread of the values, or null. */
export function Histogram({ title, values, found, unit, hint }) {
  const shown = bins(values);
  const most = Math.max(...shown.map(({ count }) => count));
  const range = shown.length > 0 ? [shown[0].from, shown.at(-1).to] : [0, 0];
  return html`<section class="card groups-histogram" aria-label=${title}>
    <div class="bar"><h2>${title}</h2><span class="quiet small">${hint}</span>
      ${found && html`<span class="push small tabular"><span class="quiet">mean</span> ${reward(found.mean)} <span class="quiet">± ${reward(found.std)}</span></span>`}
    </div>
    ${found === null
      ? html`<p class="groups-nothing quiet">No session has a reward yet.</p>`
      : html`<div class="groups-plot" role="img" aria-label=${`${title}: ${plural(values.length, "value")}, ${shown.filter(({ count }) => count).map(binText(unit)).join("; ")}`}>
          <span class="groups-most quiet small tabular" title=${plural(most, unit)}>${compact(most)}</span>
          <div class="groups-bars">
            ${shown.map((bin) => html`<span key=${bin.from} class="groups-column" title=${binText(unit)(bin)}>
              <span style=${{ height: bin.count ? `max(2px, ${(bin.count / most) * 100}%)` : "0" }}></span></span>`)}
            <span class="groups-marker" title=${`mean ${reward(found.mean)}`} style=${{ left: `${share(found.mean, range) * 100}%` }}></span>
          </div>
          <div class="groups-axis quiet small tabular">${axis(range).map((value) => html`<span key=${value}>${reward(value)}</span>`)}</div>
        </div>`}
  </section>`;
}

const binText = (unit) => ({ from, to, count }) => `${from === to ? reward(from) : `${reward(from)} to ${reward(to)}`}: ${plural(count, unit)}`;
const axis = ([low, high]) => (low === high ? [low] : [low, (low + high) / 2, high]);
const at = (value, range, width) => share(value, range) * width;
