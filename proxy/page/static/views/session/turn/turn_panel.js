// One turn: what it was asked, what it answered, how long it took, and for a fork what it differs in.
import { html } from "../../../lib/html.js";
import { useLoad } from "../../../lib/load.js";
import { Loaded } from "../../../lib/notice.js";
import { useReasons } from "../../../lib/reasons.js";
import { Conversation } from "./conversation.js";
import { CopyBar } from "./copy_bar.js";
import { TurnError, TurnHead } from "./head.js";
import { Fork } from "./fork.js";
import { readTurn } from "./read_turn.js";
import { Recorded } from "./recorded.js";
import { Settings } from "./settings.js";

const PARTS = "messages,times,compared,replay";

/** `sessionId`; `turn`: an interaction id or a turn number; `query`: of the address; `tree`: its session; `revision` reloads it. */
export function TurnPanel({ sessionId, turn, query, tree, revision }) {
  const loaded = useLoad((options) => readTurn(sessionId, turn, PARTS, options), [sessionId, turn, revision], { keep: true });
  const mine = loaded.data && belongs(loaded.data, sessionId, turn) ? loaded : { ...loaded, data: undefined };
  const reasons = useReasons();
  const show = (data) => html`<${Turn} key=${data.interaction_id} turn=${data} query=${query} reasons=${reasons} active=${(tree?.status ?? "active") === "active"} />`;
  return html`<div class="turn" aria-busy=${loaded.loading}>
    <${Loaded} what=${`Loading turn ${turn}`} from=${mine} show=${show} />
  </div>`;
}

/** Old data stays while the same turn is read again, and never stands for another turn. */
const belongs = (data, sessionId, turn) =>
  data.session_id === sessionId && (data.interaction_id === turn || String(data.turn) === String(turn));

function Turn({ turn, query, reasons, active }) {
  return html`
    <${TurnHead} turn=${turn} reasons=${reasons} />
    <${Recorded} replay=${turn.replay} />
    <${CopyBar} turn=${turn} active=${active} />
    <${TurnError} turn=${turn} reasons=${reasons} />
    <${Fork} turn=${turn} query=${query} reasons=${reasons} />
    <${Conversation} turn=${turn} query=${query} />
    <${Settings} turn=${turn} reasons=${reasons} />
  `;
}
