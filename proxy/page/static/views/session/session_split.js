// Two parts side by side with a bar between them that can be dragged, or moved with the arrow keys.
import { html, useRef, useState } from "../../lib/html.js";
import { keep, kept } from "../../lib/kept.js";

const LEAST = 25, MOST = 75, STEP = 2, KEY = "tokengrove-split";

/** `left` and `right`: templates. The share of the left one, in percent, is kept for this browser. */
export function Split({ left, right, class: name = "" }) {
  const frame = useRef(null);
  const [share, setShare] = useState(shareKept);
  const move = (value) => {
    const next = Math.round(Math.min(MOST, Math.max(LEAST, value)));
    setShare(next);
    keep(KEY, String(next));
  };
  const drag = (event) => {
    if (event.buttons !== 1) return;
    const { left: start, width } = frame.current.getBoundingClientRect();
    move(((event.clientX - start) / width) * 100);
  };
  const onKeyDown = (event) => {
    const to = { ArrowLeft: share - STEP, ArrowRight: share + STEP, Home: LEAST, End: MOST }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    move(to);
  };
  return html`<div class=${`split ${name}`} ref=${frame} style=${{ "--share": `${share}%` }}>
    <div class="split-left">${left}</div>
    <div class="split-bar" role="separator" tabindex="0" aria-label="Width of the tree" aria-orientation="vertical" aria-valuenow=${share}
      aria-valuemin=${LEAST} aria-valuemax=${MOST} onKeyDown=${onKeyDown} onPointerDown=${(event) => event.currentTarget.setPointerCapture(event.pointerId)}
      onPointerMove=${drag} onDblClick=${() => move(46)}></div>
    <div class="split-right">${right}</div>
  </div>`;
}

function shareKept() {
  const share = Number(kept(KEY));
  return share >= LEAST && share <= MOST ? share : 46;
}
