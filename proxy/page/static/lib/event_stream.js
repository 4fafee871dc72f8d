// Server-sent events out of text, as the HTML standard has them: no DOM, no network.

/** A parser. `feed(text)` returns the events that the text completes: [{event, data}]. Comments are skipped. */
export function eventParser() {
  let rest = "";
  let event = "";
  let data = [];
  const line = (text, found) => {
    if (text === "") {
      if (data.length) found.push({ event: event || "message", data: data.join("\n") });
      event = "";
      data = [];
      return;
    }
    const [, field, value] = /^([^:]*):? ?(.*)$/s.exec(text);
    if (field === "event") event = value;
    else if (field === "data") data.push(value);
  };
  return {
    feed(text) {
      const found = [];
      const lines = (rest + text).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const each of lines) line(each, found);
      return found;
    },
  };
}

/** Seconds to wait before attempt number `attempt` (from 1), doubled each time up to 30; `random` from 0 to 1 spreads them. */
export const backOff = (attempt, random = 0.5) => Math.min(30, 2 ** (attempt - 1)) * (0.75 + random / 2);
