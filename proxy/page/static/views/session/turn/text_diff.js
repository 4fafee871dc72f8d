// What differs between two texts, in bounded time: by words, else by lines, else the place where they begin to differ.
// Pure: no DOM.
import { diffLines } from "../../../vendor/diff/diff/line.js";
import { diffWordsWithSpace } from "../../../vendor/diff/diff/word.js";

const SHORT = 60_000; // characters of both sides together that may differ all over and are still compared by words
const LONGEST = 2_500_000;
const MOST_EDITS = 2_000;
const MOST_EDITS_OF_LONG = 100;
const MOST_MS = 400;

/**
 * {by, pieces}: `by` is "same", "words", "lines" or "place"; pieces are {kind, text} in order, `kind` "same", "removed"
 * or "added". The pieces but the added ones are `recorded`, those but the removed ones `sent`, character for character.
 */
export function differences(recorded, sent) {
  if (recorded === sent) return { by: "same", pieces: recorded === "" ? [] : [{ kind: "same", text: recorded }] };
  const head = equalStart(recorded, sent);
  const tail = equalEnd(recorded, sent, head);
  const [old, now] = [recorded.slice(head, recorded.length - tail), sent.slice(head, sent.length - tail)];
  const { by, pieces } = middle(old, now);
  const before = [{ kind: "same", text: recorded.slice(0, head) }];
  const after = [{ kind: "same", text: recorded.slice(recorded.length - tail) }];
  return { by, pieces: joined([...before, ...pieces, ...after]) };
}

function middle(old, now) {
  const length = old.length + now.length;
  if (old === "" || now === "") return { by: "words", pieces: whole(old, now) };
  if (length > LONGEST) return { by: "place", pieces: whole(old, now) };
  const most = length <= SHORT ? MOST_EDITS : MOST_EDITS_OF_LONG;
  const words = diffWordsWithSpace(old, now, { maxEditLength: most, timeout: MOST_MS });
  if (words) return { by: "words", pieces: words.map(piece) };
  const lines = diffLines(old, now, { maxEditLength: MOST_EDITS, timeout: MOST_MS });
  if (lines) return { by: "lines", pieces: lines.map(piece) };
  return { by: "place", pieces: whole(old, now) };
}

const piece = ({ value, added, removed }) => ({ kind: added ? "added" : removed ? "removed" : "same", text: value });
const whole = (old, now) => [{ kind: "removed", text: old }, { kind: "added", text: now }];

/** How many characters at the beginning are equal, up to the start of the word that differs. */
function equalStart(one, other) {
  const most = Math.min(one.length, other.length);
  let at = 0;
  while (at < most && one[at] === other[at]) at += 1;
  while (at > 0 && inWord(one[at - 1]) && (inWord(one[at]) || inWord(other[at]))) at -= 1;
  return at;
}

/** The same at the end; `head` characters are taken already. */
function equalEnd(one, other, head) {
  const most = Math.min(one.length, other.length) - head;
  let count = 0;
  while (count < most && one[one.length - 1 - count] === other[other.length - 1 - count]) count += 1;
  const edges = () => [one[one.length - count], one[one.length - count - 1], other[other.length - count - 1]];
  while (count > 0) {
    const [first, ours, theirs] = edges();
    if (!inWord(first) || !(inWord(ours) || inWord(theirs))) break;
    count -= 1;
  }
  return count;
}

/** Letters, digits and halves of surrogate pairs, which are never torn apart. */
const inWord = (character) => character !== undefined && /[\p{L}\p{N}\p{M}_\ud800-\udfff]/u.test(character);

/** Neighbours of one kind as one piece; empty pieces are left out. */
function joined(pieces) {
  const out = [];
  for (const { kind, text } of pieces) {
    if (text === "") continue;
    if (out.at(-1)?.kind === kind) out[out.length - 1] = { kind, text: out.at(-1).text + text };
    else out.push({ kind, text });
  }
  return out;
}

/**
 * Pieces of which long equal ones lose their middle: {kind: "gap", text} stands for what is left out. `around`: the
 * characters that stay on either side of a change.
 */
export function shortened(pieces, around = 200) {
  return pieces.flatMap((each, index) => {
    if (each.kind !== "same" || each.text.length <= 3 * around) return [each];
    const [start, end] = [index === 0 ? 0 : around, index === pieces.length - 1 ? 0 : around];
    const left = each.text.slice(start, each.text.length - end);
    const parts = [each.text.slice(0, start), left, end ? each.text.slice(-end) : ""];
    return parts.map((text, at) => ({ kind: at === 1 ? "gap" : "same", text })).filter(({ text }) => text !== "");
  });
}
