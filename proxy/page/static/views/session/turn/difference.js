// The difference of two texts: what one side lacks is struck out, what the other has is underlined, white space is shown.
import { number } from "../../../lib/format.js";
import { html, useMemo, useState } from "../../../lib/html.js";
import { Text } from "../../../lib/text.js";
import { cutAt } from "./fold.js";
import { differences, shortened } from "./text_diff.js";
import { seenSpace } from "./white_space.js";

const MOST_SHOWN = 20_000;
const MOST_PIECES = 1_000;
const HOW = {
  lines: "Compared line by line: the texts are long.",
  place: "The texts are too long and too different to compare: shown is where they begin to differ.",
};

/** `recorded`, `sent`: the two texts. `names`: whose they are, {recorded: "turn 4 has", sent: "this turn sent"}. */
export function Difference({ recorded, sent, names }) {
  const [whole, setWhole] = useState(false);
  const found = useMemo(() => differences(recorded, sent), [recorded, sent]);
  const pieces = useMemo(() => (whole ? found.pieces : shortened(found.pieces)), [found, whole]);
  if (found.by === "same") return html`<p class="small quiet">${recorded === "" ? "Both texts are empty." : "The texts are the same."}</p>`;
  const both = recorded !== "" && sent !== "";
  const gaps = pieces.some(({ kind }) => kind === "gap");
  return html`<figure class=${`turn-difference${both ? "" : " turn-one-side"}`}>
    <figcaption class="small quiet">
      ${recorded !== "" && html`<span class="turn-removed">− ${names.recorded}</span>`}${" "}
      ${sent !== "" && html`<span class="turn-added">+ ${names.sent}</span>`}
      ${" "}${HOW[found.by] ?? ""}
    </figcaption>
    <pre class="turn-text">${pieces.slice(0, MOST_PIECES).map((piece, index) => html`<${Piece} key=${index} ...${piece} both=${both} />`)}</pre>
    ${pieces.length > MOST_PIECES && html`<p class="small quiet">and ${number(pieces.length - MOST_PIECES)} more places that differ</p>`}
    ${gaps && html`<button type="button" class="turn-more" onClick=${() => setWhole(true)}>Show what is equal, too</button>`}
  </figure>`;
}

/** `both`: whether there is a text on either side, so that white space may be all that differs. */
function Piece({ kind, text, both }) {
  if (kind === "gap") return html`<span class="turn-gap">⋯ ${number(text.length)} equal characters ⋯</span>`;
  const end = cutAt(text, MOST_SHOWN);
  const rest = end < text.length && html`<span class="turn-gap">⋯ ${number(text.length - end)} more characters ⋯</span>`;
  if (kind === "same") return html`<${Text} text=${text.slice(0, end)} />${rest}`;
  const Element = kind === "removed" ? "del" : "ins";
  return html`<${Element} class=${`turn-${kind}`}><${Text} text=${both ? seenSpace(text.slice(0, end)) : text.slice(0, end)} />${rest}<//>`;
}
