// All rows at once, small, in the colours of the cells: a click goes there. Those who cannot see it have the grid.
import { html, useEffect, useRef } from "../../../lib/html.js";
import { colour, onThemeChange } from "../../../lib/theme.js";
import { space } from "./token_rows.js";

const WIDTH = 56;
const FOUND = 9;
const INKS = {
  logprob: ["--line", "--heat-1", "--heat-2", "--heat-3", "--heat-4", "--heat-5", "--past"],
  stream: ["--line", "--heat-1", "--heat-2", "--heat-3", "--heat-4", "--heat-5", "--past"],
  mask: ["--line", "--c1", "--c3"],
  version: ["--line", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6"],
};

/** `rows` as laid out in `columns`, `row` pixels high; `scroller`: a ref of the element that scrolls. */
export function Strip({ rows, row, columns, model, classOf, colouring, found, scroller }) {
  const canvas = useRef(null);
  const frame = useRef(null);
  useEffect(() => {
    const element = canvas.current; // the observer may call once more after the element has gone
    const draw = () => paint(element, { rows, columns, model, classOf, colouring, found });
    draw();
    const watcher = new ResizeObserver(draw);
    watcher.observe(element);
    const unwatch = onThemeChange(draw);
    return () => {
      watcher.disconnect();
      unwatch();
    };
  }, [rows, classOf, colouring, found]);
  useEffect(() => {
    const [element, mark] = [scroller.current, frame.current];
    const follow = () => {
      const whole = Math.max(1, rows.length * row);
      mark.style.top = `${(element.scrollTop / whole) * 100}%`;
      mark.style.height = `${Math.min(100, (element.clientHeight / whole) * 100)}%`;
    };
    follow();
    element.addEventListener("scroll", follow, { passive: true });
    const watcher = new ResizeObserver(follow);
    watcher.observe(element);
    return () => {
      element.removeEventListener("scroll", follow);
      watcher.disconnect();
    };
  }, [rows]);
  const jump = (event) => {
    if (event.buttons !== 1) return;
    const box = canvas.current.getBoundingClientRect();
    const element = scroller.current;
    element.scrollTop = ((event.clientY - box.top) / box.height) * rows.length * row - element.clientHeight / 2;
  };
  return html`<div class="tokens-strip" aria-hidden="true" title="All tokens: click to go there"
    onPointerDown=${jump} onPointerMove=${jump}>
    <canvas ref=${canvas}></canvas><div class="tokens-strip-frame" ref=${frame}></div>
  </div>`;
}

function paint(canvas, { rows, columns, model, classOf, colouring, found }) {
  const scale = devicePixelRatio || 1;
  canvas.width = Math.round((canvas.clientWidth || WIDTH) * scale);
  canvas.height = Math.round(canvas.clientHeight * scale);
  const context = canvas.getContext("2d");
  const tall = canvas.height / Math.max(1, rows.length);
  const wide = canvas.width / (columns + 4);
  // What is rare is drawn last: where many rows share a line of pixels, it stays to be seen.
  byKind(rows, model, classOf, found).forEach((boxes, kind) => {
    const ink = kind === FOUND ? "--focus" : INKS[colouring][kind];
    if (!boxes.length || !ink) return;
    context.fillStyle = colour(ink);
    for (const [row, from, width] of boxes) {
      context.fillRect(from * wide, row * tall, Math.max(width * wide, 1), Math.max(tall * 0.7, 1));
    }
  });
}

/** Boxes [row, column, width] of neighbours of one class, by class; what a search found is in the last list, too. */
function byKind(rows, model, classOf, found) {
  const boxes = Array.from({ length: FOUND + 1 }, () => []);
  rows.forEach((row, at) => {
    let [used, open] = [0, null];
    for (let token = row.from; token < row.to; token += 1) {
      const needed = space(model, token);
      if (found[token]) boxes[FOUND].push([at, used, needed]);
      if (open?.kind === classOf[token]) open.box[2] += needed;
      else {
        open = { kind: classOf[token], box: [at, used, needed] };
        boxes[open.kind].push(open.box);
      }
      used += needed;
    }
  });
  return boxes;
}
