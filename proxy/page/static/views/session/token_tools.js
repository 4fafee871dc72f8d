// The controls above the tokens: colours, the export whose masks are shown, jumps, and the search.
import { number, plural } from "../../lib/format.js";
import { html, useMemo, useRef } from "../../lib/html.js";
import { isUntrained, lowestFirst, nextUntrained } from "./token_model.js";
import { nextPlace } from "./token_search.js";
import { turnName } from "./token_cells.js";

const COLOURINGS = [["logprob", "Logprob"], ["mask", "Trained"], ["version", "Version"]];
const LAYOUTS = ["concat", "individual", "tree"];

/** `change(query)` changes the address; `go(token)` shows a token and gives it the focus; `places`: what the search found. */
export function Tools({ model, colouring, query, change, active, go, search, setSearch, places }) {
  return html`<div class="tokens-tools bar">
    <fieldset class="tokens-colours"><legend class="visually-hidden">Colour by</legend>
      ${COLOURINGS.map(([value, words]) => html`<button type="button" aria-pressed=${colouring === value} onClick=${() => change({ colour: value })}>${words}</button>`)}
    </fieldset>
    <${Export} query=${query} change=${change} />
    <${Jumps} model=${model} active=${active} go=${go} />
    <${Search} search=${search} setSearch=${setSearch} places=${places} active=${active} go=${go} keep=${(find) => change({ find })} />
  </div>`;
}

/** Which export the states are of. */
function Export({ query, change }) {
  const layouts = !query.layout || LAYOUTS.includes(query.layout) ? LAYOUTS : [...LAYOUTS, query.layout];
  const layout = (value) => change({ layout: value === "concat" ? null : value, drift: value === "tree" ? null : query.drift });
  return html`
    <label>Layout <select value=${query.layout ?? "concat"} onChange=${(event) => layout(event.target.value)}>
      ${layouts.map((each) => html`<option value=${each}>${each}</option>`)}
    </select></label>
    <label title="What becomes of turns whose prompt was rendered anew">Drift
      <select value=${query.drift ?? "fork"} disabled=${query.layout === "tree"} onChange=${(event) => change({ drift: event.target.value === "fork" ? null : event.target.value })}>
      <option value="fork">fork</option><option value="mask">mask</option></select></label>
    <label title="Train every turn, or only those that no turn continues">Train
      <select value=${query.train ?? ""} onChange=${(event) => change({ train: event.target.value || null })}>
      <option value="">all</option><option value="last">last turns</option>
      ${query.train && query.train !== "last" && html`<option value=${query.train}>as in the address</option>`}
    </select></label>`;
}

function Jumps({ model, active, go }) {
  const lowest = useMemo(() => lowestFirst(model), [model]);
  const step = useRef(-1);
  const untrained = useMemo(() => model.states.some((run) => run.end > run.start && isUntrained(model, run.start)), [model]);
  const toLowest = () => {
    // Whoever has moved away begins with the lowest again.
    step.current = lowest[step.current] === active ? (step.current + 1) % lowest.length : 0;
    go(lowest[step.current]);
  };
  const part = model.partOf[active];
  return html`
    <label>Go to <select class="tokens-part" value=${part} onChange=${(event) => go(model.parts[event.target.value].start, false)}>
      ${model.parts.map((each, at) => html`<option value=${at}>${turnName(each)} ${each.kind === "output" ? "answer" : "prompt"}</option>`)}
    </select></label>
    <button type="button" disabled=${!lowest.length} onClick=${toLowest} title="Go to the lowest logprob; again: to the next lowest">Lowest logprob</button>
    <button type="button" disabled=${!untrained} onClick=${() => go(nextUntrained(model, active))}
      title=${untrained ? "Go to the next sampled token that is not trained" : "All sampled tokens of this path are trained"}>Next untrained</button>`;
}

function Search({ search, setSearch, places, active, go, keep }) {
  const move = (step, focus) => {
    const at = nextPlace(places, active, step);
    if (at >= 0) go(places[at][0], focus);
  };
  const onKeyDown = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    move(event.shiftKey ? -1 : 1, false);
  };
  const told = search === "" ? "" : places.length ? plural(places.length, "place") : "not found";
  const here = places.findIndex(([first]) => first === active);
  return html`<search class="tokens-search push">
    <input type="search" placeholder="Text or #id" aria-label="Search in the tokens" value=${search} maxlength="200"
      onInput=${(event) => setSearch(event.target.value)} onChange=${(event) => keep(event.target.value)} onKeyDown=${onKeyDown} />
    <span class="small quiet tabular" role="status">${here >= 0 && places.length > 1 ? `${number(here + 1)} of ${number(places.length)}` : told}</span>
    <button type="button" class="plain" aria-label="Previous place" disabled=${!places.length} onClick=${() => move(-1, false)}>↑</button>
    <button type="button" class="plain" aria-label="Next place" disabled=${!places.length} onClick=${() => move(1, false)}>↓</button>
  </search>`;
}
