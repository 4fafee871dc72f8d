// An image as a thumbnail: it is read when it comes into view, given back when it has left it, and opened by a click.
import { html, useEffect, useRef, useState } from "../../../lib/html.js";
import { reason } from "../../../lib/notice.js";
import { printable } from "../../../lib/printable.js";
import { facts, spokenImage } from "./image_words.js";
import { ImageDialog } from "./image_dialog.js";
import { useImage } from "./read_image.js";

const WIDE = 240;
const HIGH = 150;
const LEAST = 24;
const NEAR = "400px";

/** `image`: of a message or of the tokens: {digest, width, height, detail, tokens or length}. `wide`, `high`: at most, in pixels. */
export function Picture({ sessionId, image, wide = WIDE, high = HIGH }) {
  const box = useRef(null);
  const near = useNear(box);
  const [open, setOpen] = useState(false);
  const { file, error, again } = useImage(sessionId, image.digest, near || open);
  const [broken, setBroken] = useState(null);
  const failed = error ?? (file !== null && broken === file.url ? new Error("The browser cannot show these bytes.") : null);
  const said = spokenImage(image, file ?? {});
  const size = fitted(image, wide, high);
  return html`<figure class="picture-box" ref=${box}>
    ${failed
      ? html`<div class="picture-frame picture-failed small" role="alert">
          <span>${printable(reason(failed))}</span>
          ${error && html`<button type="button" class="plain" onClick=${again}>Try again</button>`}
        </div>`
      : html`<button type="button" class="picture-frame" style=${size} title="Open the whole picture" disabled=${file === null} onClick=${() => setOpen(true)}>
          ${file === null
            ? html`<span class="quiet small"><span class="visually-hidden">${said} </span>${near ? "Loading…" : ""}</span>`
            : html`<img class="picture" src=${file.url} alt=${said} decoding="async" onError=${() => setBroken(file.url)} />`}
        </button>`}
    <figcaption class="small quiet tabular" title=${image.digest}>${facts(image, file ?? {}).join(" · ")}</figcaption>
    ${open && file !== null && html`<${ImageDialog} image=${image} file=${file} close=${() => setOpen(false)} />`}
  </figure>`;
}

/** Whether an element is in view, or soon will be. */
function useNear(box) {
  const [near, setNear] = useState(false);
  useEffect(() => {
    const watcher = new IntersectionObserver((seen) => setNear(seen.at(-1).isIntersecting), { rootMargin: NEAR });
    watcher.observe(box.current);
    return () => watcher.disconnect();
  }, []);
  return near;
}

/** The size of the thumbnail, known before its bytes, so that nothing moves when they come. */
function fitted({ width, height }, wide, high) {
  if (!width || !height) return { width: `${high}px`, height: `${high}px` };
  const scale = Math.min(1, wide / width, high / height);
  return { width: `${Math.max(LEAST, Math.round(width * scale))}px`, height: `${Math.max(LEAST, Math.round(height * scale))}px` };
}
