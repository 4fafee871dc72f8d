// The controls above the tokens: colours, the export whose masks are shown, jumps, and the search.
import { number, plural } from "../../../lib/format.js";
import { html, useMemo, useRef } from "../../../lib/html.js";
import { isUntrained, lowestFirst, nextUntrained } from "./token_model.js";
import { routeOption, valueOf } from "../samples/samples_options.js";
import { nextPlace } from "./token_search.js";
import { turnName } from "./token_cells.js";

const COLOURINGS = [["logprob", "Logprob"], ["mask", "Trained"], ["version", "Version"]];
const LAYOUTS = ["concat", "individual", "tree"];

/** `change(query)` changes the address; `go(token)` shows a token and gives it the focus; `places`: of the search. */
export function Tools({ model, colouring, query, change, active, go, search, setSearch, places, routes, streams }) {
  return html`<div class="tokens-tools bar">
    <fieldset class="tokens-colours"><legend class="visually-hidden">Colour by</legend>
      ${COLOURINGS.map(([value, words]) => html`<button type="button" aria-pressed=${colouring === value}
        onClick=${() => change({ colour: value })}>${words}</button>`)}
    </fieldset>
    ${streams.choices.length > 0 && html`<${Told} streams=${streams} query=${query} change=${change} />`}
    <${Export} query=${query} change=${change} route=${routeOption(routes)} />
    <${Jumps} model=${model} active=${active} go=${go} />
    <${Search} search=${search} setSearch=${setSearch} places=${places} active=${active} go=${go}
      keep=${(find) => change({ find })} />
  </div>`;
}

/** Which stream of a trainer colours the tokens. */
function Told({ streams, query, change }) {
  const choose = ({ target: { value } }) => change(value ? { colour: "stream", stream: value } : { colour: null, stream: null });
  return html`<label title="Colour by what a trainer told of the tokens">Trainer
    <select class="tokens-told" value=${query.colour === "stream" ? (streams.chosen?.key ?? "") : ""} onChange=${choose}>
      <option value="">–</option>
      ${streams.choices.map(({ key, words }) => html`<option value=${key}>${words}</option>`)}
    </select></label>`;
}

/** Which export the states are of. What is left at its default does not stand in the address. */
function Export({ query, change, route }) {
  const layouts = !query.layout || LAYOUTS.includes(query.layout) ? LAYOUTS : [...LAYOUTS, query.layout];
  const isTree = query.layout === "tree";
  const toLayout = ({ target: { value } }) =>
    change({ layout: value === "concat" ? null : value, drift: value === "tree" ? null : query.drift });
  const toDrift = ({ target: { value } }) => change({ drift: value === "fork" ? null : value });
  const toTrain = ({ target: { value } }) => change({ train: value || null });
  return html`
    <label>Layout <select value=${query.layout ?? "concat"} onChange=${toLayout}>
      ${layouts.map((each) => html`<option value=${each}>${each}</option>`)}
    </select></label>
    <label title="What becomes of turns whose prompt was rendered anew">Drift
      <select value=${query.drift ?? "fork"} disabled=${isTree} onChange=${toDrift}>
      <option value="fork">fork</option><option value="mask">mask</option></select></label>
    <label title="Train every turn, or only those that no turn continues">Train
      <select value=${query.train ?? ""} onChange=${toTrain}>
      <option value="">all</option><option value="last">last turns</option>
      ${query.train && query.train !== "last" && html`<option value=${query.train}>as in the address</option>`}
    </select></label>
    ${route && html`<label title="Whose turns are exported">Route
      <select value=${valueOf(route, query)} onChange=${({ target: { value } }) => change({ route: value || null })}>
      ${route.values.map((each) => html`<option value=${each}>${route.words[each] ?? each}</option>`)}
    </select></label>`}`;
}

function Jumps({ model, active, go }) {
  const sorted = useRef(null);
  const step = useRef(-1);
  const told = useMemo(() => model.logprobs.some((value) => value !== null), [model]);
  const left = useMemo(() => model.states.some((run) => isUntrained(model, run.start)), [model]);
  const toLowest = () => {
    if (sorted.current?.model !== model) sorted.current = { model, lowest: lowestFirst(model) };
    const { lowest } = sorted.current;
    // Whoever has moved away begins with the lowest again.
    step.current = lowest[step.current] === active ? (step.current + 1) % lowest.length : 0;
    go(lowest[step.current]);
  };
  const toPart = (event) => go(model.parts[event.target.value].start, false);
  return html`
    <label>Go to <select class="tokens-part" value=${model.partOf[active]} onChange=${toPart}>
      ${model.parts.map((part, at) => html`<option value=${at}>${partName(part)}</option>`)}
    </select></label>
    <button type="button" disabled=${!told} onClick=${toLowest}
      title="Go to the lowest logprob; again: to the next lowest">Lowest logprob</button>
    <button type="button" disabled=${!left} onClick=${() => go(nextUntrained(model, active))} title=${left
      ? "Go to the next sampled token that is not trained"
      : "All sampled tokens of this path are trained"}>Next untrained</button>`;
}

const partName = (part) => `${turnName(part)} ${part.kind === "output" ? "answer" : "prompt"}`;

function Search({ search, setSearch, places, active, go, keep }) {
  const move = (step) => {
    const at = nextPlace(places, active, step);
    if (at >= 0) go(places[at][0], false);
  };
  const onKeyDown = (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault();
    move(event.shiftKey ? -1 : 1);
  };
  return html`<search class="tokens-search push">
    <input type="search" placeholder="Text or #id" aria-label="Search in the tokens" value=${search} maxlength="200"
      onInput=${(event) => setSearch(event.target.value)} onChange=${(event) => keep(event.target.value)}
      onKeyDown=${onKeyDown} />
    <span class="small quiet tabular" role="status">${outcome(search, places, active)}</span>
    <button type="button" class="plain" aria-label="Previous place" disabled=${!places.length}
      onClick=${() => move(-1)}>↑</button>
    <button type="button" class="plain" aria-label="Next place" disabled=${!places.length}
      onClick=${() => move(1)}>↓</button>
  </search>`;
}

/** What a search found, in words: "3 places", "2 of 3" at one of them. */
function outcome(search, places, active) {
  if (search === "") return "";
  if (!places.length) return "not found";
  const here = places.findIndex(([first]) => first === active);
  if (here < 0 || places.length < 2) return plural(places.length, "place");
  return `${number(here + 1)} of ${number(places.length)}`;
}
