// What is said of an image in words, and where it stands in a text. Pure: no DOM.
import { bytes, number, plural } from "../../../lib/format.js";
import { afterCharacters } from "../turn/fold.js";

/** The media types that the page shows. An SVG would be a document. */
export const SHOWN = { "image/png": "PNG", "image/jpeg": "JPEG", "image/webp": "WebP", "image/gif": "GIF" };
const DIGEST = 12;
const DETAILS = { low: "low detail", high: "high detail" };

/** The facts of an image, in order: size, type, bytes, detail, tokens, digest. `file`: {type, size} once it is read. */
export function facts(image, file = {}) {
  const size = image.width && image.height ? `${number(image.width)} × ${number(image.height)}` : null;
  const kind = file.type && Object.hasOwn(SHOWN, file.type) ? SHOWN[file.type] : null;
  const weight = file.size === undefined ? null : bytes(file.size);
  const tokens = image.tokens ?? image.length;
  const count = Number.isInteger(tokens) ? plural(tokens, "token") : null;
  const detail = Object.hasOwn(DETAILS, image.detail ?? "") ? DETAILS[image.detail] : null;
  return [size, kind, weight, detail, count, shortDigest(image.digest)].filter((fact) => fact !== null);
}

/** The beginning of a digest: enough to tell images apart. */
export const shortDigest = (digest) => (digest.length > DIGEST ? `${digest.slice(0, DIGEST)}…` : digest);

/** An image as one line: what stands for it where it is not seen. */
export const spokenImage = (image, file) => `Image ${facts(image, file).join(", ")}`;

/**
 * A text and its images in their order: [{text, start, end} or {image, index}]. `at` of an image counts characters as Python
 * does; one that lies outside of the text stands at its end.
 */
export function pieces(text, images) {
  const found = [];
  let [done, counted] = [0, 0];
  images.forEach((image, index) => {
    const more = Math.max(0, (image.at ?? 0) - counted);
    const end = done + afterCharacters(text.slice(done), more);
    if (end > done) found.push({ text: text.slice(done, end), start: done, end });
    found.push({ image, index });
    [done, counted] = [end, counted + more];
  });
  if (done < text.length) found.push({ text: text.slice(done), start: done, end: text.length });
  return found;
}

/** The images that one list has and the other lacks, by digest and detail: {recorded, sent}. */
export function otherImages(recorded, sent) {
  const key = ({ digest, detail = "" }) => `${digest} ${detail}`;
  const lacking = (mine, theirs) => {
    const counts = new Map();
    for (const image of theirs) counts.set(key(image), (counts.get(key(image)) ?? 0) + 1);
    return mine.filter((image) => {
      const left = counts.get(key(image)) ?? 0;
      counts.set(key(image), left - 1);
      return left <= 0;
    });
  };
  return { recorded: lacking(recorded, sent), sent: lacking(sent, recorded) };
}
