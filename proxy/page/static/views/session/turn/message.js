// One message: its role, text, reasoning (collapsed), calls, and of a result the call that it answers.
import { plural } from "../../../lib/format.js";
import { html } from "../../../lib/html.js";
import { pieces } from "../images/image_words.js";
import { Picture } from "../images/picture.js";
import { afterCharacters } from "./fold.js";
import { pretty } from "./pretty_json.js";
import { Line, LongText, Short } from "./texts.js";

const LONGEST_JSON = 200_000;

/**
 * `place`: of `linked`. `answer`: whether it is the answer of this turn. `prefill`: characters that the client wrote.
 * `folded`: calls, results and reasoning are closed (true), or all open (false); by default only reasoning is closed. */
export function MessageView({ place, sessionId, answer = false, prefill = 0, folded = null }) {
  const { message, index, call } = place;
  const calls = message.tool_calls ?? [];
  const images = message.images ?? [];
  return html`<li class=${`turn-message ${kind(message.role)}${answer ? " turn-answer" : ""}`} tabindex="-1" data-message=${index}>
    <div class="turn-message-head">
      <h3>${answer ? "answer" : message.role}</h3>
      ${message.role === "tool" && html`<${Answered} message=${message} call=${call} />`}
      ${message.name && message.role !== "tool" && html`<span class="quiet small"><${Short} text=${message.name} /></span>`}
      ${prefill > 0 && html`<span class="small quiet">the client wrote the first ${plural(prefill, "character")} of the text</span>`}
      <span class="push quiet small tabular">${answer ? "" : `message ${index}`}</span>
    </div>
    ${message.reasoning_content && html`<${Reasoning} text=${message.reasoning_content} open=${folded === null ? answer && !message.content && !calls.length : !folded} />`}
    <${Folded} folded=${message.role === "tool" ? folded : null} summary=${message.content}>${images.length > 0
      ? html`<${Interleaved} text=${message.content} images=${images} sessionId=${sessionId} />`
      : (message.content !== "" || (!calls.length && !message.reasoning_content)) && html`<${Body} text=${message.content} prefill=${prefill} />`}<//>
    ${calls.map((each, index) => html`<${Call} key=${index} call=${each} folded=${folded} />`)}
  </li>`;
}

const KNOWN = ["system", "user", "assistant", "tool"];
const kind = (role) => (KNOWN.includes(role) ? `turn-${role}` : "");

/** The text of a message; what the client wrote of an answer stands in a box of its own. */
function Body({ text, prefill }) {
  if (!prefill) return html`<${LongText} text=${text} />`;
  const end = afterCharacters(text, prefill);
  return html`<${LongText} text=${text.slice(0, end)} class="turn-prefill" /><${LongText} text=${text.slice(end)} />`;
}

/** A text with its images, each at its place. */
function Interleaved({ text, images, sessionId }) {
  return pieces(text, images).map((piece) => (piece.image
    ? html`<${Picture} key=${`image ${piece.index}`} sessionId=${sessionId} image=${piece.image} />`
    : html`<${LongText} key=${piece.start} text=${piece.text} />`));
}

function Reasoning({ text, open }) {
  return html`<details class="turn-reasoning" open=${open}>
    <summary>Reasoning <span class="quiet small"><${Line} text=${text.trimStart()} length=${90} /></span></summary>
    <${LongText} text=${text} />
  </details>`;
}

function Answered({ message, call }) {
  const id = message.tool_call_id;
  return html`<span class="small">
    ${call ? html`result of <code><${Line} text=${call.name} length=${60} /></code> <span class="quiet">in message ${call.index}</span>` : html`<span class="warn">${id ? "answers no call of this conversation" : "names no call"}</span>`}
    ${id && html` <span class="quiet"><${Short} text=${id} length=${20} /></span>`}
  </span>`;
}

/** `children` below a line that opens them, whose text is `summary`; without it if `folded` is null. */
const Folded = ({ folded, summary, children }) => (folded === null ? children : html`<details class="turn-folded" open=${!folded}>
    <summary class="small quiet"><${Line} text=${summary} length=${120} /></summary>${children}
  </details>`);

/** A tool call; arguments that are JSON get line breaks, other ones are shown as they are. */
function Call({ call, folded }) {
  const { name, arguments: given } = call.function;
  const shown = given.length <= LONGEST_JSON ? pretty(given) : null;
  return html`<div class="turn-call">
    <div class="turn-message-head">
      <span class="small quiet">calls</span> <code class="turn-call-name"><${Line} text=${name} length=${80} /></code>
      ${shown === null && html`<span class="small warn">${given.length > LONGEST_JSON ? "arguments as sampled: too long to lay out" : "the arguments are no JSON"}</span>`}
      <span class="push quiet small"><${Short} text=${call.id} length=${20} /></span>
    </div>
    <${Folded} folded=${folded} summary=${given}><${LongText} text=${shown ?? given} empty="no arguments" /><//>
  </div>`;
}
