// Copies a turn: its text, its ids, and commands that read it or send it again. Saves its session as a file.
import { address, adminKey, inPath } from "../../../lib/api.js";
import { CopyButton } from "../../../lib/copy.js";
import { html, useState } from "../../../lib/html.js";
import { printable } from "../../../lib/printable.js";
import { reason } from "../../../lib/notice.js";
import { readCommand, sendCommand } from "./curl.js";
import { Downloads } from "./downloads.js";
import { messageText } from "./messages.js";
import { readTurn, turnUrl } from "./read_turn.js";

const READ = "messages,times,compared,reply";

/** `turn`: with its messages. `active`: whether its session takes more turns. */
export function CopyBar({ turn, active }) {
  const copy = { class: "turn-button" };
  return html`<div class="turn-bars">
    <div class="turn-group" role="group" aria-label="Copy">
      <span class="small quiet" aria-hidden="true">Copy</span>
      <${CopyButton} ...${copy} label="the answer as text" text=${() => messageText(turn.output)}>answer<//>
      <${CopyButton} ...${copy} label="the conversation as text" text=${() => conversationText(turn)}>conversation<//>
      <${CopyButton} ...${copy} label="the id of the turn" text=${turn.interaction_id}>id<//>
      <${CopyButton} ...${copy} label="curl: read, a command that shows this turn"
        text=${() => readCommand(turnUrl(turn.session_id, turn.interaction_id, READ), adminKey() !== null)}>curl: read<//>
      <${Again} turn=${turn} active=${active} />
    </div>
    <${Downloads} sessionId=${turn.session_id} />
  </div>`;
}

function conversationText(turn) {
  const messages = [...turn.messages, turn.output];
  return messages.map((message) => `[${message.role}]\n${messageText(message)}\n`).join("\n");
}

/** The command that sends the turn again. The API writes it, and says what the command does not say as the turn had it. */
function Again({ turn, active }) {
  const [said, setSaid] = useState(null);
  const command = async () => {
    try {
      const { request } = await readTurn(turn.session_id, turn.interaction_id, "request");
      setSaid({ text: consequences(request, turn.session_id, active) });
      return active ? sendCommand(address(request.path), request.body, adminKey() !== null) : elsewhere(turn.session_id, request);
    } catch (error) {
      setSaid({ text: `The request could not be read: ${printable(reason(error))}`, bad: true });
      throw error;
    }
  };
  return html`<${CopyButton} class="turn-button" label="curl: resend, a command that sends this turn again" text=${command}>curl: resend<//>
    ${said && html`<span role="status" class=${`small turn-said ${said.bad ? "bad" : "quiet"}`}>${said.text}</span>`}`;
}

const again = (sessionId) => `${sessionId}-again`;

/** A session that has ended takes no more turns: the turn goes to a new one. */
function elsewhere(sessionId, { path, body }) {
  const name = again(sessionId);
  const api = path.slice(path.search(/\/v1(beta)?\/(?!.*\/v1(beta)?\/)/));
  const withKey = adminKey() !== null;
  return sendCommand(address("rl/start_session"), { session_id: name }, withKey) + sendCommand(address(inPath(name) + api), body, withKey);
}

function consequences({ lacks, same_elsewhere: same }, sessionId, active) {
  const effect = active ? "Sent, it becomes one more turn of this session." : `This session has ended: sent, it becomes the first turn of a new one, ${printable(again(sessionId))}.`;
  const ids = lacks.length > 0 ? `It does not say as the turn had it: ${lacks.join(", ")}.`
    : active || same ? "The prompt will have the same token ids." : "The prompt will have other token ids, since earlier answers are tokenized again.";
  return `${effect} ${ids}${active && !same ? " In another session the prompt would have other ids." : ""}`;
}
