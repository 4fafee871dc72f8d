// Reads the bytes of an image from the API, for as long as something shows it.
import { inPath, request, address } from "../../../lib/api.js";
import { useEffect, useState } from "../../../lib/html.js";
import { ImageStore } from "./image_store.js";
import { SHOWN } from "./image_words.js";

const DIGEST = /^[0-9a-f]{64}$/;

/** The path of an image of a session in the API. */
export const imagePath = (sessionId, digest) => `rl/sessions/${inPath(sessionId)}/images/${encodeURIComponent(digest)}`;

/**
 * {url, type, size, file} of an image, `file` being the Blob. Whatever its bytes hold, they are shown as one of four types of pictures, from an address
 * that only this tab knows.
 */
async function read(path, options) {
  const answer = await request(address(path), options);
  const type = (answer.headers.get("content-type") ?? "").split(";")[0].trim().toLowerCase();
  if (!Object.hasOwn(SHOWN, type)) throw new Error("The server sent something else than a picture.");
  const file = new Blob([await answer.arrayBuffer()], { type });
  return { url: URL.createObjectURL(file), type, size: file.size, file };
}

const store = new ImageStore({ read, free: (url) => URL.revokeObjectURL(url) });

/** The image while `wanted`: {file, error, again}. `file` is as of `read`, or null until it is read. */
export function useImage(sessionId, digest, wanted) {
  const [state, setState] = useState({ file: null, error: null });
  const [tries, setTries] = useState(0);
  const path = imagePath(sessionId, digest);
  useEffect(() => {
    if (!wanted) return undefined;
    let shown = true;
    const settle = (next) => shown && setState({ file: null, error: null, ...next });
    if (!DIGEST.test(digest)) settle({ error: new Error("The digest is not one of an image.") });
    else store.hold(path).then((file) => settle({ file }), (error) => settle({ error }));
    return () => {
      shown = false;
      store.release(path);
      setState({ file: null, error: null });
    };
  }, [path, wanted, tries]);
  return { ...state, again: () => setTries((count) => count + 1) };
}
