// A chart over time or another number: drawn by uPlot on a canvas, with a legend and its numbers as words or a table.
import uPlot from "uplot";
import { download } from "../../lib/download.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "../../lib/html.js";
import { colour, onThemeChange } from "../../lib/theme.js";
import { apart, csv, inWords, rows, summary } from "./series.js";

const DASHES = [[], [6, 4], [2, 3]];
const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9];
const LINES = ["solid", "dashed", "dotted"];

/**
 * `series`: [{label, colour: "--c1"}]; `data`: [x, values of each]. `format` writes a value, `x` where it is, and `tick`
 * the same in short, for the axis. `empty`: what is said without values. `asTable`: the numbers instead of the drawing; `heading`: of its
 * first column. `save`: they can be saved as CSV.
 * `drawing`: {time, points, whole, least, range}. `time` (by default): x are Unix seconds, else whole numbers. `points`:
 * mark each value. `whole`: the ticks of values are whole numbers. `least`: what their axis reaches at least (1), or
 * `range` chooses it.
 */
export function Chart({ title, unit, series, data, format, x, tick = x, asTable = false, heading, save = false, empty, ...drawing }) {
  const first = heading ?? ((drawing.time ?? true) ? "at" : "version");
  const saved = () => download(csv(first, series.map(({ label }) => label), data), `${title}.csv`, "text/csv");
  const [hovered, setHovered] = useState(null);
  const known = data.slice(1).some((values) => values.some((value) => value !== null));
  const named = series.map((each, place) => ({ ...each, values: data[place + 1] }));
  return html`<section class="card overview-card" aria-label=${title}>
    <${Head} title=${title} unit=${unit} series=${named} format=${format} at=${hovered} x=${x} data=${data} save=${save && known ? saved : null} />
    ${!known
      ? html`<p class="overview-none">${empty}</p>`
      : asTable
        ? html`<${Table} title=${title} series=${series} data=${data} format=${format} x=${x} heading=${first} />`
        : html`<div class="overview-plot" role="img" aria-label=${`${title} ${unit}. ${inWords(named, format)}`}>
            <${Plot} ...${{ series, data, format, tick, drawing, setHovered }} />
          </div>`}
  </section>`;
}

/** The title and the legend, with the values that the pointer is at, else the newest. */
function Head({ title, unit, series, format, at, x, data, save }) {
  const there = at !== null && at < data[0].length;
  return html`<header class="overview-head">
    <h2>${title} <span class="quiet small">${there ? x(data[0][at]) : unit}</span></h2>
    <dl class="overview-legend">
      ${series.map(({ label, colour: property, values }, place) => {
        const value = there ? values[at] : summary(values).last;
        return html`<div key=${label}>
          <dt>
            <span class="overview-line" aria-hidden="true" style=${{ borderTopStyle: LINES[place], color: `var(${property})` }}></span>
            ${label}
          </dt>
          <dd class="tabular">${value === null || value === undefined ? "–" : format(value)}</dd>
        </div>`;
      })}
    </dl>
    ${save && html`<button type="button" class="plain small" title="Save these numbers" onClick=${save}>CSV</button>`}
  </header>`;
}

function Table({ title, series, data, format, x, heading }) {
  return html`<div class="overview-scroll" tabindex="0" role="group" aria-label=${`${title}, as a table`}>
    <table>
      <thead>
        <tr>
          <th scope="col">${heading}</th>
          ${series.map(({ label }) => html`<th key=${label} scope="col" class="number">${label}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${rows(data).map(
          ([at, ...values]) =>
            html`<tr key=${at}>
              <th scope="row" class="tabular">${x(at)}</th>
              ${values.map((value, place) => html`<td key=${place} class="number">${value === null ? "–" : format(value)}</td>`)}
            </tr>`,
        )}
      </tbody>
    </table>
  </div>`;
}

/** The canvas. It is made anew when its size or the theme changes, and given new data otherwise. */
function Plot({ series, data, format, tick, drawing, setHovered }) {
  const place = useRef(null);
  const plot = useRef(null);
  const latest = useRef(data);
  latest.current = data;
  const shape = series.map(({ label }) => label).join();
  useLayoutEffect(() => {
    const box = place.current;
    const make = () => {
      plot.current?.destroy();
      const { clientWidth: width, clientHeight: height } = box;
      const options = { width, height, ...looks({ series, format, tick, ...drawing }) };
      options.hooks = { setCursor: [(drawn) => setHovered(drawn.cursor.idx ?? null)] };
      plot.current = new uPlot(options, latest.current, box);
    };
    make();
    const sized = new ResizeObserver(() => {
      const { clientWidth: width, clientHeight: height } = box;
      if (width !== plot.current.width || height !== plot.current.height) plot.current.setSize({ width, height });
    });
    sized.observe(box);
    const themed = onThemeChange(make);
    return () => {
      sized.disconnect();
      themed();
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape, tick]);
  useEffect(() => plot.current?.setData(data), [data]);
  return html`<div class="overview-canvas" ref=${place}></div>`;
}

function looks({ series, format, tick, time = true, points = false, whole = false, least = 1, range }) {
  const quiet = colour("--quiet");
  const line = colour("--line");
  const font = "11px system-ui, sans-serif";
  const axis = { stroke: quiet, font, gap: 4, grid: { stroke: line, width: 1 }, ticks: { show: false } };
  const below = { size: 22, space: time ? 70 : 30, ...(time ? {} : { incrs: WHOLE }), grid: { show: false } };
  const left = { size: (_, values) => Math.max(46, 10 + 6.5 * longest(values)), space: 22, ...(whole ? { incrs: WHOLE } : {}) };
  return {
    legend: { show: false },
    cursor: { drag: { x: false, y: false }, y: false, points: { size: 6 } },
    padding: [8, 24, 0, 0],
    scales: { x: { time, range: apart(time ? 30 : 1) }, y: { range: range ?? fromZero(least) } },
    axes: [
      { ...axis, ...below, values: (_, ticks) => ticks.map(tick) },
      { ...axis, ...left, values: (_, ticks) => ticks.map(format) },
    ],
    series: [
      {},
      ...series.map(({ label, colour: property }, index) => ({
        label,
        stroke: colour(property),
        width: 1.5,
        dash: DASHES[index],
        points: { show: points, size: 5, fill: colour(property) },
      })),
    ],
  };
}

const longest = (texts) => Math.max(0, ...(texts ?? []).map((text) => text.length));

/** From zero to a little above the highest value, and to `least` in any case. */
const fromZero = (least) => (_, lowest, most) => [Math.min(0, lowest ?? 0), Math.max((most ?? 0) * 1.1, least)];
