// What a turn recorded beside its tokens, with how much of it is missing.
import { html } from "../../../lib/html.js";
import { recordedWords } from "./recorded_words.js";

/** `replay`: of the turn; nothing is drawn if it is empty. */
export function Recorded({ replay }) {
  const entries = recordedWords(replay);
  if (entries.length === 0) return null;
  return html`<p class="small turn-recorded" role="note"><strong>recorded</strong> ${entries.map(({ name, words, whole }, at) => html`<span key=${name}>
    ${at > 0 && " · "}${name}: <span class=${whole ? "" : "warn"}>${words}</span></span>`)}</p>`;
}
