// What each sample of an export contains, for a layout and its options: a bar each, and the turns of the chosen one.
import { post } from "../../../lib/api.js";
import { number } from "../../../lib/format.js";
import { html, useMemo } from "../../../lib/html.js";
import { useLoad } from "../../../lib/load.js";
import { Empty, Loaded, Notice } from "../../../lib/notice.js";
import { useReasons } from "../../../lib/reasons.js";
import { replace } from "../../../lib/route.js";
import { VirtualList } from "../../../lib/virtual_list.js";
import { inWords } from "../../../lib/words.js";
import { SampleBar, SampleLegend } from "./sample_bar.js";
import { SampleTurns } from "./sample_turns.js";
import { bodyOf } from "./samples_options.js";
import { SamplesForm } from "./samples_form.js";
import { ofSession } from "./samples_shape.js";

const ROW = 58; // pixels: the height of a sample in the list

/** `query`: of the address, with the options. `tree`, `nodes`: the session; when it grows, samples are read again. */
export function SamplesView({ sessionId, query, tree, nodes }) {
  const body = JSON.stringify(bodyOf(sessionId, tree.group_id, query));
  const grown = useMemo(() => versionOf(tree), [tree]);
  const load = async ({ signal }) => {
    const answer = await post("/trajectories/export", JSON.parse(body), { signal });
    return ofSession(await answer.json(), sessionId);
  };
  const loaded = useLoad(load, [body, grown], { keep: true });
  const choose = (more) => replace("session", sessionId, { ...query, ...more });
  return html`<div class="samples">
    <${SamplesForm} query=${query} routes=${tree.routes} onChange=${(next) => replace("session", sessionId, next)} />
    <${Loaded} what="Making the samples" from=${loaded} show=${(found) =>
      html`<${Summary} entry=${found.entry} count=${found.samples.length} compared=${found.compared} />
        ${found.samples.length > 0 &&
        html`<${Samples} found=${found} query=${query} nodes=${nodes} sessionId=${sessionId} choose=${choose} />`}`} />
  </div>`;
}

function Samples({ found, query, nodes, sessionId, choose }) {
  const { samples, entry } = found;
  const at = Math.min(samples.length - 1, Math.max(0, Number.parseInt(query.sample, 10) || 0));
  const scale = samples.reduce((most, sample) => Math.max(most, sample.tokens), 1);
  const numbers = useMemo(() => new Map(nodes.map((node) => [node.interaction_id, node.turn])), [nodes]);
  const draw = (index) => html`<${SampleBar} sample=${samples[index]} index=${index} scale=${scale}
    chosen=${index === at} numbers=${numbers} onChoose=${(turn) => choose({ sample: String(index), ...(turn ? { turn } : {}) })} />`;
  return html`<${SampleLegend} />
    <div class="samples-list" style=${{ height: `${Math.min(samples.length, 5) * ROW + 2}px` }}>
      <${VirtualList} count=${samples.length} row=${ROW} draw=${draw} label="Samples" />
    </div>
    <${SampleTurns} sample=${samples[at]} index=${at} entry=${entry} numbers=${numbers}
      sessionId=${sessionId} query=${query} />`;
}

/** How much is trained, why the rest is not, and what the server warns of. */
function Summary({ entry, count, compared }) {
  const meanings = useReasons();
  if (!entry) return html`<${Empty} title="Not in this export">The server left this session out.<//>`;
  const { sampled_tokens: sampled, trained_tokens: trained, untrained_tokens: untrained } = entry;
  const group = compared > 1 ? `; compared in a group of ${number(compared)} sessions` : "";
  const why = meanings.left_out?.[entry.left_out] ?? inWords(entry.left_out);
  const leftOut = `with these options an export has no sample of this session, which ${why}.`;
  return html`<p class="samples-sum">
      <strong class="tabular">${number(count)}</strong> ${count === 1 ? "sample" : "samples"};
      <strong class="tabular"> ${number(trained)}</strong> of ${number(sampled)} sampled tokens are trained${group}.
      ${Object.entries(untrained).map(([word, tokens]) => html` <span class="badge warn"
        title=${meanings.untrained_tokens?.[word]}>${number(tokens)} not trained: ${inWords(word)}</span>`)}
      ${COUNTS.filter(([name]) => entry[name]).map(
        ([name, words]) => html` <span class="badge">${number(entry[name])} ${words}</span>`,
      )}
    </p>
    ${entry.left_out && html`<${Notice} kind="warn" title="Left out:" text=${leftOut} />`}
    ${entry.warnings.map((warning) => html`<${Notice} kind="warn" text=${warning} />`)}`;
}

const COUNTS = [
  ["dropped_samples", "samples dropped"],
  ["unrewarded_samples", "paths without a reward"],
  ["masked_tokens", "tokens masked"],
];

/** Changes when turns, rewards or marks do. */
const versionOf = (tree) => JSON.stringify([tree.status, tree.outcome, tree.interactions.map(versionOfTurn)]);
const versionOfTurn = (node) => [node.interaction_id, node.status, node.reward, node.rewards, node.trainable, node.spans];
