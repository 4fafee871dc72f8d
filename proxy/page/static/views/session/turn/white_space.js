// White space that can be seen: at the ends of lines, in runs, tabs and line breaks. Pure: no DOM.

/** The text with "·" for spaces that nobody would see, and signs before tabs and line breaks. */
export const seenSpace = (text) =>
  text.replace(/^ +| +$| {2,}/gm, (spaces) => "·".repeat(spaces.length)).replace(/\t/g, "⇥\t").replace(/\n/g, "↵\n");
