// One session: its header, its tree, and beside it the chosen turn, its tokens, or the samples that an export makes.
import { Empty, Failure, Waiting } from "../../lib/notice.js";
import { html, useEffect, useState } from "../../lib/html.js";
import { printable } from "../../lib/printable.js";
import { link, replace } from "../../lib/route.js";
import { useTitle } from "../../lib/title.js";
import { useSession } from "./session_data.js";
import { nodeNamed } from "./session_facts.js";
import { SessionHeader } from "./session_header.js";
import { EpisodeView } from "./episode/episode_view.js";
import { Split } from "./session_split.js";
import { RewardForm } from "./reward_form.js";
import { lastMain } from "./reward_words.js";
import { RunningPanel } from "./running_panel.js";
import { SamplesView } from "./samples/samples_view.js";
import { TokenView } from "./tokens/token_view.js";
import { TreeView } from "./tree/tree_view.js";
import { TurnPanel } from "./turn/turn_panel.js";

const TABS = [["", "Turn"], ["conversation", "Conversation"], ["tokens", "Tokens"], ["samples", "Samples"]];
const SETTLED_MS = 120;

/** `name`: the session id. `query.turn`: the interaction id (or turn number) that is shown; `query.show`: its part. */
export const SessionView = ({ name, query }) => html`<${Session} key=${name} name=${name} query=${query} />`;

/** Of one session only: what was read of another one never stands under its name. */
function Session({ name, query }) {
  useTitle(`Session ${name}`);
  const { tree, nodes, error, reload } = useSession(name);
  return html`<div class="session">
    <${SessionHeader} name=${name} tree=${tree} nodes=${nodes}>
      ${tree && html`<${Reward} name=${name} query=${query} tree=${tree} nodes=${nodes} reload=${reload} />`}
    <//>
    ${error && html`<${Failure} what="Reading the session" error=${error} retry=${reload} />`}
    ${tree ? html`<${Parts} name=${name} query=${query} tree=${tree} nodes=${nodes} />` : html`<${NotYet} error=${error} />`}
  </div>`;
}

/** The form for the complete turn that the address names, else for the session; nothing before its first turn. */
function Reward({ name, query, tree, nodes, reload }) {
  const named = nodeNamed(nodes, query.turn);
  const whole = named?.status !== "complete";
  const node = whole ? lastMain(nodes) : named;
  return node && html`<${RewardForm} name=${name} node=${node} whole=${whole} score=${tree.episode_score} reload=${reload} />`;
}

/** Before the first answer: the session is on its way, is not there, or could not be read. */
const NotYet = ({ error }) =>
  error ? html`<p><a href=${link("sessions")}>All sessions</a></p>` : html`<${Waiting} text="Loading the session…" />`;

function Parts({ name, query, tree, nodes }) {
  if (!nodes.length) {
    return html`<${Empty} title="No turns yet">
      Nothing was sampled in this session. Its first turn appears here by itself.
    <//>`;
  }
  const chosen = nodeNamed(nodes, query.turn) ?? (query.turn ? undefined : nodes[0]);
  const choose = (turn) => replace("session", name, { ...query, turn, way: undefined, message: undefined });
  return html`<${Split} class=${partOf(query) === "conversation" ? "split-reading" : ""}
    left=${html`<${TreeView} sessionId=${name} nodes=${nodes} chosen=${chosen?.interaction_id} onChoose=${choose} />`}
    right=${html`<nav class="session-tabs" aria-label="Parts of the session">
        ${TABS.map(([show, title]) => html`<a href=${link("session", name, { ...query, show })}
          aria-current=${partOf(query) === show ? "page" : undefined}>${title}</a>`)}
      </nav>
      <div class="session-pane">
        <${Pane} name=${name} query=${query} tree=${tree} node=${chosen} nodes=${nodes} />
      </div>`}
  />`;
}

const partOf = (query) => (TABS.some(([show]) => show === query.show) ? query.show : "");

function Pane({ name, query, tree, node, nodes }) {
  const settled = useSettled(node?.interaction_id);
  if (partOf(query) === "samples") return html`<${SamplesView} sessionId=${name} query=${query} tree=${tree} nodes=${nodes} />`;
  if (partOf(query) === "conversation") return html`<${EpisodeView} name=${name} query=${query} nodes=${nodes} />`;
  if (!node) return html`<${Empty} title="No such turn">This session has no turn “${printable(query.turn, { line: true })}”. Choose one in the tree.<//>`;
  if (node.status === "running") return html`<${RunningPanel} node=${node} />`;
  const Part = partOf(query) === "tokens" ? TokenView : TurnPanel;
  const before = nodes.find((each) => each.interaction_id === settled);
  const shown = before && before.status !== "running" ? before : node; // of a running call nothing can be read
  return html`<${Part} key=${shown.interaction_id} sessionId=${name} turn=${shown.interaction_id} query=${query}
    tree=${tree} revision=${revisionOf(shown)} />`;
}

/** Changes when the entry of a turn does: its reward was set, or its mark. */
const revisionOf = (node) => JSON.stringify([node.status, node.reward, node.rewards, node.return, node.trainable, node.spans, node.purpose]);

/** The value once it has stayed for a moment: who holds an arrow key down does not want every turn in between. */
function useSettled(value) {
  const [settled, setSettled] = useState(value);
  useEffect(() => {
    const timer = setTimeout(() => setSettled(value), SETTLED_MS);
    return () => clearTimeout(timer);
  }, [value]);
  return settled;
}
