// Hands a text or bytes over as a file.
import { fileName } from "./printable.js";

/** Save `content` (string, Blob or ArrayBuffer) under a name; what an agent may have put into the name is taken out. */
export function download(content, name, type = "application/octet-stream") {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  const link = document.createElement("a");
  link.href = url;
  link.download = fileName(name);
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
