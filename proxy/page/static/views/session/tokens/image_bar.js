// What is known of the image that the chosen token stands for, and how to see it or its tokens.
import { plural } from "../../../lib/format.js";
import { html } from "../../../lib/html.js";
import { Picture } from "../images/picture.js";

/** `folded`: whether its tokens are one cell; `toggle` changes that. */
export function ImageBar({ sessionId, image, folded, toggle }) {
  return html`<section class="tokens-image card" aria-label="The image of the chosen token">
    <${Picture} key=${image.start} sessionId=${sessionId} image=${image} wide=${160} high=${72} />
    <button type="button" aria-expanded=${!folded} onClick=${toggle}>
      ${folded ? `Show its ${plural(image.length, "token")}` : `Fold its ${plural(image.length, "token")}`}
    </button>
  </section>`;
}
