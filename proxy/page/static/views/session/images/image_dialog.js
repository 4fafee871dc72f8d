// A whole picture above the page. It closes by Escape, by its button, and by a click beside it.
import { CopyButton } from "../../../lib/copy.js";
import { download } from "../../../lib/download.js";
import { html, useEffect, useRef, useState } from "../../../lib/html.js";
import { facts, spokenImage } from "./image_words.js";

/** `file`: {url, type, size, file} of `image`, which stays as long as this is open. */
export function ImageDialog({ image, file, close }) {
  const dialog = useRef(null);
  const [whole, setWhole] = useState(false);
  useEffect(() => {
    const before = document.activeElement;
    dialog.current.showModal();
    return () => before?.focus({ preventScroll: true });
  }, []);
  const save = () => download(file.file, `${image.digest.slice(0, 12)}.${file.type.replace("image/", "")}`);
  const beside = (event) => event.target === dialog.current && close();
  return html`<dialog class="picture-dialog" ref=${dialog} aria-label="The whole picture" onClose=${close} onClick=${beside}
    onKeyDown=${(event) => event.stopPropagation()}>
    <div class="bar">
      <span class="small tabular">${facts(image, file).slice(0, -1).join(" · ")}</span>
      <button type="button" aria-pressed=${whole} onClick=${() => setWhole(!whole)}>Full size</button>
      <button type="button" onClick=${save}>Save</button>
      <button type="button" class="push" onClick=${close}>Close</button>
    </div>
    <div class=${`picture-whole ${whole ? "full" : ""}`} tabindex="0" role="group" aria-label="Picture">
      <img class="picture" src=${file.url} alt=${spokenImage(image, file)} />
    </div>
    <p class="small quiet">SHA-256 <code>${image.digest}</code> <${CopyButton} text=${image.digest} label="the digest" />
      ${file.type === "image/gif" && html` · of a GIF the model sees the first frame`}</p>
  </dialog>`;
}
