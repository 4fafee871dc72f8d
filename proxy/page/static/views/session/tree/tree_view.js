// The tree of a session: a row each, like a git graph. Only rows near the view exist, so 2,000 turns cost what 30 do.
// One row is the current one; it is the chosen turn, and keys move it. The list itself has the focus.
import { html, useLayoutEffect, useMemo, useRef, useState } from "../../../lib/html.js";
import { number } from "../../../lib/format.js";
import { useReasons } from "../../../lib/reasons.js";
import { keyAction, nextRow } from "./tree_keys.js";
import { forksOf, layOut, unfoldFor } from "./tree_layout.js";
import { useNearest } from "../comparison.js";
import { NearestLine, ROW } from "./tree_graph.js";
import { NOTE, TreeRow } from "./tree_row.js";
import { scrollFor, shownRows, topsOf } from "./tree_window.js";
import { isCompared, isFork, isLost } from "./tree_words.js";

const NONE = new Set();

/**
 * `nodes`: of `nodesOf`. `chosen`: the id of the chosen node. `onChoose(id)`. `sessionId`: for what is read of forks.
 */
export function TreeView({ sessionId, nodes, chosen, onChoose }) {
  const [folded, setFolded] = useState(NONE);
  const [open, setOpen] = useState(NONE);
  const { rows, lanes } = useMemo(() => layOut(nodes, folded), [nodes, folded]);
  const tops = useMemo(() => topsOf(rows, (row) => (isOpen(row, open) ? ROW + NOTE : ROW)), [rows, open]);
  const at = useMemo(() => rows.findIndex((row) => row.node.interaction_id === chosen), [rows, chosen]);
  const list = useList(rows, tops, at);
  const meanings = useReasons();
  const shown = columnsOf(nodes);

  const goTo = (index) => {
    list.scrollTo(index);
    onChoose(rows[index].node.interaction_id);
  };
  const toggle = (id) => setOpen((old) => toggled(old, id));
  const fold = (id) => setFolded((old) => toggled(old, id));
  const onKeyDown = (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target !== list.ref.current) return;
    const row = rows[at], action = keyAction(event.key, rows, at);
    if ((event.key === "Enter" || event.key === " ") && row && hasNote(row.node)) toggle(row.node.interaction_id);
    else if (!action) return;
    else if (action.to !== undefined) goTo(action.to);
    else fold(action.fold ?? action.unfold);
    event.preventDefault();
  };
  const find = (wanted) => {
    const found = nextRow(rows, at, wanted);
    if (found >= 0) goTo(found);
    list.ref.current.focus({ preventScroll: true });
  };
  useLayoutEffect(() => {
    if (at >= 0) list.scrollTo(at);
    else setFolded((old) => without(old, unfoldFor(nodes, chosen)));
  }, [chosen]);
  const nearest = useNearest(sessionId, rows[at]?.node);
  const near = useMemo(() => rows.findIndex((row) => row.node.interaction_id === nearest), [rows, nearest]);
  const place = (index) => ({ lane: rows[index].lane, y: tops[index] + ROW / 2 });
  const drawn = drawnRows(shownRows(tops, list.top, list.height), at, rows.length);
  const empty = `${shown.reward ? "" : "no-reward"} ${shown.returned ? "" : "no-return"}`;
  return html`<section class=${`tree ${empty}`} aria-label="Turns">
    <${Toolbar} nodes=${nodes} folded=${folded} setFolded=${setFolded} find=${find} />
    <div class="tree-list" role="tree" tabindex="0"
      aria-label="Turns of the session" aria-activedescendant=${at >= 0 ? `tree-row-${at}` : undefined}
      ref=${list.ref} onKeyDown=${onKeyDown}>
      <div class="tree-space" role="none" style=${{ height: `${tops[rows.length]}px` }}>
        ${drawn.map(
          (index) => html`<${TreeRow} key=${rows[index].node.interaction_id} row=${rows[index]} index=${index}
            count=${rows.length} lanes=${lanes} top=${tops[index]} height=${tops[index + 1] - tops[index]}
            chosen=${index === at} near=${index === near} open=${isOpen(rows[index], open)}
            folded=${folded.has(rows[index].node.interaction_id)} meanings=${meanings} sessionId=${sessionId}
            onChoose=${() => onChoose(rows[index].node.interaction_id)} onToggle=${toggle} onFold=${fold} />`,
        )}
        ${near >= 0 && at >= 0 && near !== rows[at].parent &&
        html`<${NearestLine} from=${place(at)} to=${place(near)} />`}
      </div>
    </div>
  </section>`;
}

/** What a row can open: why it forked, or why it failed. */
export const hasNote = (node) => isCompared(node) || isLost(node);

const isOpen = (row, open) => open.has(row.node.interaction_id) && hasNote(row.node);

function Toolbar({ nodes, folded, setFolded, find }) {
  const forks = nodes.filter(isFork).length, lost = nodes.filter(isLost).length;
  const branching = useMemo(() => forksOf(nodes), [nodes]);
  const all = branching.length > 0 && branching.every((id) => folded.has(id));
  return html`<div class="tree-bar">
    <button type="button" class="plain" disabled=${!forks} onClick=${() => find(isFork)}>
      Next fork <span class="tabular">(${number(forks)})</span>
    </button>
    <button type="button" class="plain" disabled=${!lost} onClick=${() => find(isLost)}>
      Next failure <span class="tabular">(${number(lost)})</span>
    </button>
    <button type="button" class="plain" disabled=${!branching.length} aria-pressed=${all}
      onClick=${() => setFolded(all ? NONE : new Set(branching))}>Fold branches</button>
    <span class="tree-heads" aria-hidden="true">
      <span>prompt + output</span><span class="of-reward">reward</span><span class="of-return">return</span>
    </span>
  </div>`;
}

/** The place of the view in the list. When rows come or go, the first row that was in view stays where it was. */
function useList(rows, tops, at) {
  const ref = useRef(null), anchor = useRef(null);
  const [view, setView] = useState({ top: 0, height: 600 });
  const measure = () => {
    const { scrollTop, clientHeight } = ref.current;
    const [first] = shownRows(tops, scrollTop, 0, 0);
    const atEnd = scrollTop > 0 && scrollTop + clientHeight >= tops[rows.length] - 2;
    const id = rows[first]?.node.interaction_id;
    anchor.current = rows.length ? { id, offset: scrollTop - tops[first], atEnd } : null;
    const same = (old) => old.top === scrollTop && old.height === clientHeight;
    setView((old) => (same(old) ? old : { top: scrollTop, height: clientHeight }));
  };
  useLayoutEffect(() => {
    const { clientHeight } = ref.current;
    const place = anchor.current
      ? placeOf(anchor.current, rows, tops, clientHeight)
      : beginning(tops, at, clientHeight);
    if (place !== null && place !== ref.current.scrollTop) ref.current.scrollTop = place;
    measure();
    const element = ref.current, watcher = new ResizeObserver(measure);
    element.addEventListener("scroll", measure, { passive: true });
    watcher.observe(element);
    return () => {
      element.removeEventListener("scroll", measure);
      watcher.disconnect();
    };
  }, [rows, tops]);
  const scrollTo = (index) => {
    ref.current.scrollTop = scrollFor(tops, index, ref.current.scrollTop, ref.current.clientHeight);
  };
  return { ref, ...view, scrollTo };
}

/** Where the list begins: with the chosen row in the middle, if it is further down. */
const beginning = (tops, at, height) => (at < 0 || tops[at + 1] <= height ? null : tops[at] - height / 2);

function placeOf({ id, offset, atEnd }, rows, tops, height) {
  if (atEnd) return Math.max(0, tops[rows.length] - height); // whoever watches the end goes on to watch it
  const index = rows.findIndex((row) => row.node.interaction_id === id);
  return index < 0 ? null : tops[index] + offset;
}

/** The current row is always drawn: screen readers look for it. */
function drawnRows([from, to], at, count) {
  const drawn = Array.from({ length: Math.max(0, Math.min(to, count) - from) }, (_, index) => from + index);
  return at < 0 || (at >= from && at < to) ? drawn : [...drawn, at].sort((one, other) => one - other);
}

function toggled(old, id) {
  const next = new Set(old);
  if (!next.delete(id)) next.add(id);
  return next;
}

function without(old, ids) {
  return ids.some((id) => old.has(id)) ? new Set([...old].filter((id) => !ids.includes(id))) : old;
}

/** Which columns have anything in them. */
const columnsOf = (nodes) => ({
  reward: nodes.some((node) => node.reward !== null && node.reward !== undefined),
  returned: nodes.some((node) => node.return),
});
