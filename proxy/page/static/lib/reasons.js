// What the words mean that answers of the API give as reasons (GET /rl/reasons): read once, then kept.
import { get } from "./api.js";
import { useEffect, useState } from "./html.js";

let asked = null;

/** {field: {word: meaning}}: `reason`, `status`, `finish_reason`, `why`, `notes`, `untrained_tokens`...; {} until they are read. */
export function useReasons() {
  const [words, setWords] = useState({});
  useEffect(() => {
    let here = true;
    reasons().then((found) => here && setWords(found), () => null); // without them a word stands alone
    return () => {
      here = false;
    };
  }, []);
  return words;
}

/** The same as a promise. A failure is not kept: the next caller asks again. */
export function reasons() {
  asked ??= get("/rl/reasons").catch((error) => {
    asked = null;
    throw error;
  });
  return asked;
}
