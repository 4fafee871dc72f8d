// Finds text in tokens, also across them, and token ids. Pure: no DOM.

const MOST = 10_000;

/** The texts of all tokens in lower case, one after the other, and where each begins. */
export function searchable(texts) {
  const starts = new Uint32Array(texts.length + 1);
  const lower = texts.map((text) => (text ?? "").toLowerCase());
  lower.forEach((text, at) => (starts[at + 1] = starts[at] + text.length));
  return { text: lower.join(""), starts };
}

/** The places where `wanted` stands, as [first token, last token], at most 10,000. "#151643" looks for an id. */
export function find(wanted, index, ids) {
  if (/^#\d+$/.test(wanted)) return placesOfId(Number(wanted.slice(1)), ids);
  const [text, found] = [wanted.toLowerCase(), []];
  if (text === "") return found;
  let at = index.text.indexOf(text);
  while (at >= 0 && found.length < MOST) {
    found.push([tokenOf(index.starts, at), tokenOf(index.starts, at + text.length - 1)]);
    at = index.text.indexOf(text, at + text.length);
  }
  return found;
}

function placesOfId(id, ids) {
  const found = [];
  for (let at = 0; at < ids.length && found.length < MOST; at += 1) if (ids[at] === id) found.push([at, at]);
  return found;
}

/** The token that has the character at `place`: the last one that begins there or before, and is not empty. */
function tokenOf(starts, place) {
  let [low, high] = [0, starts.length - 2];
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (starts[middle] <= place) low = middle;
    else high = middle - 1;
  }
  return low;
}

/** Of places in order, the index of the first behind `token` (`step` 1), or the last before it (-1); goes around. */
export function nextPlace(places, token, step) {
  if (!places.length) return -1;
  if (step > 0) return Math.max(0, places.findIndex(([first]) => first > token));
  const before = places.findLastIndex(([first]) => first < token);
  return before < 0 ? places.length - 1 : before;
}
