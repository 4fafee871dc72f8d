// Why a turn forked: the reason in words, the turn that came nearest, and what differs first.
import { Badge } from "../../../lib/badge.js";
import { number, plural } from "../../../lib/format.js";
import { html, useMemo, useState } from "../../../lib/html.js";
import { Icon } from "../../../lib/icon.js";
import { useLoad } from "../../../lib/load.js";
import { Loaded } from "../../../lib/notice.js";
import { inWords } from "../../../lib/words.js";
import { link } from "../../../lib/route.js";
import { otherImages } from "../images/image_words.js";
import { Picture } from "../images/picture.js";
import { Difference } from "./difference.js";
import { messageText, sides } from "./messages.js";
import { readTurn } from "./read_turn.js";
import { Line, Text } from "./texts.js";
import { toolDifferences } from "./tool_differences.js";

const MOST_IMAGES = 8;

/** `turn`: with its messages and `compared`; nothing is drawn for one that did not fork. */
export function Fork({ turn, query, reasons }) {
  const { compared } = turn;
  const placed = turn.status === "complete"; // only a commit gives a turn its reason
  if (compared.nearest === null && (!placed || ["first", "continued"].includes(turn.reason))) return null;
  return html`<section class="turn-fork card" aria-label="Why it forked">
    <h2><${Icon} name="fork" /> ${placed ? inWords(turn.reason) : "Compared with the nearest turn"}</h2>
    ${placed && html`<p>${reasons.reason?.[turn.reason]}</p>`}
    ${compared.nearest ? html`<${Nearest} turn=${turn} query=${query} reasons=${reasons} />` : html`<p class="quiet small">No earlier turn can be compared.</p>`}
  </section>`;
}

function Nearest({ turn, query, reasons }) {
  const { compared } = turn;
  const { message, token, why } = compared;
  return html`<p>
      Nearest: <${TurnLink} of=${compared.nearest} turn=${turn} query=${query} />
      ${message && html`<span> · message ${message.index} (${message.role})${message.of && message.of.interaction_id !== compared.nearest.interaction_id ? html` of <${TurnLink} of=${message.of} turn=${turn} query=${query} />` : ""}</span>`}
      ${token && html`<span> · token ${number(token.index)}</span>`}
    </p>
    <p><${Badge} kind="warn" text=${inWords(why)} /> ${message?.count > 1 ? `${plural(message.count, "message")}: ` : ""}${reasons.why?.[why]}</p>
    ${token && html`<${Tokens} token=${token} turn=${turn} query=${query} />`}
    ${(message || compared.tools || compared.template_options) && html`<${Differences} turn=${turn} />`}`;
}

function TurnLink({ of, turn, query }) {
  const title = of.turn === null ? of.interaction_id : `turn ${of.turn}`;
  return html`<a href=${link("session", turn.session_id, { ...query, turn: of.interaction_id })}>${title}</a>`;
}

/** Both turns are read whole, since the comparison of the API is shortened. */
function Differences({ turn }) {
  const { compared } = turn;
  const loaded = useLoad((options) => readTurn(turn.session_id, compared.nearest.interaction_id, "messages", options), [turn.interaction_id]);
  return html`<${Loaded} what="Loading the nearest turn" from=${loaded} show=${(nearest) => html`<${Compared} turn=${turn} nearest=${nearest} />`} />`;
}

function Compared({ turn, nearest }) {
  const { compared } = turn;
  const { recorded, sent } = useMemo(() => sides(compared, turn, nearest), [turn, nearest]);
  const tools = useMemo(() => (compared.tools ? toolDifferences(nearest.tools, turn.tools) : []), [turn, nearest]);
  const names = { recorded: nearest.turn === null ? "the nearest turn has" : `turn ${nearest.turn} has`, sent: "this turn sent" };
  return html`
    ${compared.message && html`<${MessageDifference} why=${compared.message.why} recorded=${recorded} sent=${sent} names=${names} />
      <${ImageDifference} recorded=${recorded[0]} sent=${sent[0]} names=${names} sessionId=${turn.session_id} />`}
    ${tools.map((tool) => html`<${ToolDifference} key=${tool.name} ...${tool} names=${names} open=${compared.why === "tools" && tools.length <= 3} />`)}
    ${compared.template_options && html`<h3>template options</h3>
      <${Difference} recorded=${laidOut(compared.template_options.recorded)} sent=${laidOut(compared.template_options.sent)} names=${names} />`}`;
}

function ToolDifference({ name, change, recorded, sent, names, open }) {
  const [shown, setShown] = useState(open);
  return html`<details open=${open} onToggle=${(event) => setShown(event.currentTarget.open)}>
    <summary>tool <code><${Line} text=${name} length=${60} /></code> ${change}</summary>
    ${shown && html`<${Difference} recorded=${recorded} sent=${sent} names=${names} />`}
  </details>`;
}

const laidOut = (value) => JSON.stringify(value, null, 2);

function MessageDifference({ why, recorded, sent, names }) {
  const [old, now] = [recorded[0], sent[0]];
  if (why === "tool_call_id") {
    return html`<${Difference} recorded=${old?.tool_call_id ?? ""} sent=${now?.tool_call_id ?? ""} names=${names} />`;
  }
  if (old && now && old.role === now.role) return html`<${Difference} recorded=${messageText(old)} sent=${messageText(now)} names=${names} />`;
  return html`${[...recorded.map((message) => [message, "recorded"]), ...sent.map((message) => [message, "sent"])].slice(0, 20).map(([message, side], index) => html`<div key=${index}>
      <h3>${message.role}</h3>
      <${Difference} ...${{ recorded: "", sent: "", [side]: messageText(message) }} names=${names} />
    </div>`)}
    ${recorded.length + sent.length > 20 && html`<p class="quiet small">and ${plural(recorded.length + sent.length - 20, "more message")}</p>`}`;
}

/** The images that only one side of a message has. */
function ImageDifference({ recorded, sent, names, sessionId }) {
  const found = otherImages(recorded?.images ?? [], sent?.images ?? []);
  const sides = [["recorded", "−"], ["sent", "+"]].filter(([side]) => found[side].length > 0);
  if (sides.length === 0) return null;
  return html`<div class="turn-images">${sides.map(([side, sign]) => html`<div key=${side} class=${`turn-images-${side}`}>
    <p class="small quiet">${sign} ${names[side]} ${plural(found[side].length, "image")} that the other has not</p>
    ${found[side].slice(0, MOST_IMAGES).map((image, index) => html`<${Picture} key=${index} sessionId=${sessionId} image=${image} />`)}
    ${found[side].length > MOST_IMAGES && html`<p class="quiet small">and ${plural(found[side].length - MOST_IMAGES, "more image")}</p>`}
  </div>`)}</div>`;
}

/** The first tokens that differ, of both sides. */
function Tokens({ token, turn, query }) {
  const rows = [["recorded", "the nearest turn has", "−"], ["sent", "this turn sent", "+"]];
  return html`<table class="turn-tokens">
    <caption class="small quiet">From token ${number(token.index)} on
      (<a href=${link("session", turn.session_id, { ...query, show: "tokens" })}>all tokens</a>)</caption>
    <tbody>${rows.map(([side, name, sign]) => html`<tr key=${side}>
      <th scope="row"><span aria-hidden="true">${sign} </span>${name}</th>
      <td class="mono tabular">${token[side].join(" ") || "(ends here)"}</td>
      <td class="mono">${token[`${side}_text`] !== null && html`<${Text} text=${token[`${side}_text`]} />`}</td>
    </tr>`)}</tbody>
  </table>`;
}
