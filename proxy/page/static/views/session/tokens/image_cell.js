// The cell of an image in the grid of tokens: a thumbnail as high as a row, with its size and the number of its tokens.
import { html } from "../../../lib/html.js";
import { useImage } from "../images/read_image.js";
import { spokenImage } from "../images/image_words.js";

/** Of `shown` (a cell of the model); `found`: whether a search found one of its tokens; `at`: its first token. */
export function ImageCell({ sessionId, image, shown, at, found, tab }) {
  const { file } = useImage(sessionId, image.digest, true); // only rows that are seen are drawn
  const said = spokenImage(image, file ?? {});
  return html`<span class=${`token context token-image${found ? " found" : ""}`} role="gridcell" data-token=${at} tabindex=${tab}
    aria-label=${`${said}, context; Enter shows its tokens`} style=${{ width: `${shown.width}ch` }}>
    <span class="token-thumbnail">${file && html`<img class="picture" src=${file.url} alt="" decoding="async" />`}</span>${shown.shown}
  </span>`;
}
