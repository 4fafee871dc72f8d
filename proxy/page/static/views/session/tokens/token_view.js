// Every token of a turn's prompt and output as a cell: what it is, how likely it was, and whether it is trained.
import { get, inPath } from "../../../lib/api.js";
import { html, useEffect, useMemo, useRef, useState } from "../../../lib/html.js";
import { useLoad } from "../../../lib/load.js";
import { Empty, Failure, Loaded } from "../../../lib/notice.js";
import { replace } from "../../../lib/route.js";
import { ColumnDetails } from "./column_details.js";
import { useColumns } from "./token_columns.js";
import { Details } from "./token_details.js";
import { bandsOf, streamClasses } from "./stream_bands.js";
import { ImageBar } from "./image_bar.js";
import { TokenGrid } from "./token_grid.js";
import { cellAt, imageAt, withFolds } from "./token_images.js";
import { COLOURS, classes, tokenModel } from "./token_model.js";
import { Legend, Sections } from "./token_notes.js";
import { tokenOptions } from "./token_options.js";
import { find, searchable } from "./token_search.js";
import { useStreams } from "./token_streams.js";
import { Tools } from "./token_tools.js";

const SETTLED_MS = 300;

/** `turn`: an interaction id or a turn number; `query`: of the address; `revision`: changes when the turn did. */
export function TokenView({ sessionId, turn, query, revision, tree }) {
  const options = tokenOptions(query);
  const path = pathOf(sessionId, turn);
  const load = ({ signal }) => get(path, { include: "tokens", ...options }, { signal });
  const loaded = useLoad(load, [path, JSON.stringify(options), revision], { keep: true });
  const shown = useMemo(() => loaded.data && { ...loaded.data, model: tokenModel(loaded.data.tokens) }, [loaded.data]);
  const change = (more) => replace("session", sessionId, { ...query, ...more });
  return html`<div class="tokens" aria-busy=${loaded.loading}>
    <${Loaded} what="Loading the tokens" from=${{ ...loaded, data: shown }}
      show=${(data) => html`<${Tokens} key=${data.interaction_id} data=${data} query=${query} change=${change}
        sessionId=${sessionId} routes=${tree.routes} />`} />
  </div>`;
}

const pathOf = (sessionId, turn) => `rl/sessions/${inPath(sessionId)}/interactions/${encodeURIComponent(turn)}`;

function Tokens({ data, query, change, sessionId, routes }) {
  const { tokens } = data;
  const [unfolded, setUnfolded] = useState(() => new Set());
  const model = useMemo(() => withFolds(data.model, unfolded), [data.model, unfolded]);
  const streams = useStreams({ sessionId, tokens, named: query.stream });
  const ends = useMemo(() => streams.values && bandsOf(streams.values), [streams.values]);
  const colouring = streams.values && query.colour === "stream" ? "stream" : COLOURS.includes(query.colour) ? query.colour : "logprob";
  const classOf = useMemo(
    () => (colouring === "stream" ? streamClasses(model, streams.values, ends) : classes(model, colouring)),
    [model, colouring, streams.values],
  );
  const [active, setActive] = useActive(model, query.at, (at) => change({ at }));
  const [hovered, setHovered] = useState(null);
  const grid = useRef(null);
  const [search, setSearch] = useState(query.find ?? "");
  const index = useMemo(() => (search === "" ? null : searchable(model.texts)), [model, search === ""]);
  const places = useMemo(() => (index ? find(search, index, model.ids) : []), [search, index]);
  const go = (token, focus = true) => {
    if (token < 0 || token >= model.count) return;
    setActive(token);
    grid.current?.show(token, focus);
  };
  const image = imageAt(model, active);
  const fold = (at) => {
    const { start } = imageAt(model, at);
    setUnfolded(model.folds.has(start) ? new Set([...unfolded, start]) : new Set([...unfolded].filter((other) => other !== start)));
    go(start);
  };
  const seen = hovered !== null && hovered < model.count ? hovered : active;
  const page = useColumns({ path: pathOf(sessionId, data.interaction_id), tokens, at: seen });
  const why = data.route_kind === "external" ? "A turn of an external route has no token ids." : "This turn ended before it had a prompt.";
  if (model.count === 0) return html`<${Empty} title="No tokens">${why}<//>`;
  return html`
    <${Tools} model=${model} colouring=${colouring} query=${query} change=${change} active=${active} go=${go}
      search=${search} setSearch=${setSearch} places=${places} routes=${routes} streams=${streams} />
    ${streams.error && html`<${Failure} what="Loading what trainers told" error=${streams.error} />`}
    <${Legend} model=${model} classOf=${classOf} colouring=${colouring} told=${tokens.export} ends=${ends} />
    <${Sections} tokens=${tokens} sessionId=${sessionId} query=${query} go=${go} />
    <${TokenGrid} handle=${grid} sessionId=${sessionId} model=${model} classOf=${classOf} colouring=${colouring} active=${active}
      places=${places} onActive=${setActive} onHover=${setHovered} onFold=${fold} />
    ${image && html`<${ImageBar} sessionId=${sessionId} image=${image} folded=${model.folds.has(image.start)} toggle=${() => fold(active)} />`}
    <${Details} model=${model} at=${seen} stream=${streams.values && { words: streams.chosen.words, value: streams.values[seen] }} />
    <${ColumnDetails} model=${model} recorded=${tokens.recorded} page=${page} at=${seen} />`;
}

/** The token that has the focus, or would have it: the one that the address names, else the first that was sampled. */
function useActive(model, named, keep) {
  const [active, setActive] = useState(() => startOf(model, named));
  const at = cellAt(model, Math.min(active, Math.max(0, model.count - 1)));
  const settled = useRef(at);
  const latest = useRef(keep);
  latest.current = keep; // the address may have changed while the timer ran
  useEffect(() => {
    if (settled.current === at) return undefined;
    const timer = setTimeout(() => {
      settled.current = at;
      latest.current(at);
    }, SETTLED_MS);
    return () => clearTimeout(timer);
  }, [at]);
  return [at, setActive];
}

function startOf(model, named) {
  if (/^\d{1,9}$/.test(named ?? "") && Number(named) < model.count) return Number(named);
  return model.parts.findLast((part) => part.kind === "output")?.start ?? 0;
}
