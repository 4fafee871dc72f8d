// The turns of the chosen sample: where their outputs stand in it, what is trained of them, and why the rest is not.
import { number, reward } from "../../../lib/format.js";
import { html } from "../../../lib/html.js";
import { useReasons } from "../../../lib/reasons.js";
import { link } from "../../../lib/route.js";
import { VirtualTable } from "../../../lib/virtual_table.js";
import { inWords } from "../../../lib/words.js";
import { turnsOf } from "./samples_shape.js";

/** `entry`: of the session in the export; `numbers`: turn numbers by id. */
export function SampleTurns({ sample, index, entry, numbers, sessionId, query }) {
  const meanings = useReasons();
  const rows = turnsOf(sample, entry.output_runs).map((turn, at) => ({ ...turn, ...sample.turns[at], step: sample.step_advantages?.[at] }));
  const why = (word) => (word === "elsewhere" ? "trained in another sample" : inWords(word));
  const to = (turn, show) => link("session", sessionId, { ...query, turn, show });
  const columns = [
    { name: "turn", title: "Turn", width: "5rem", cell: ({ id }) => html`<a data-focus href=${to(id, "")}>${name(numbers, id)}</a>` },
    { name: "span", title: "Output at", width: "8rem", number: true, cell: ({ span }) => (span ? `${number(span[0])}–${number(span[1])}` : "–") },
    { name: "trained", title: "Trained", width: "7rem", number: true, cell: ({ trained, output }) => `${number(trained)} of ${number(output ?? 0)}` },
    { name: "reward", title: "Reward", width: "5rem", number: true, cell: (turn) => reward(turn.reward) },
    { name: "return", title: "Return", width: "5rem", number: true, cell: (turn) => reward(turn.return) },
    ...(sample.step_advantages ? [{ name: "step", title: "Advantage", width: "6rem", number: true, cell: (turn) => reward(turn.step) }] : []),
    { name: "why", title: "Not trained because", cell: ({ untrained }) => html`<span title=${untrained.map((word) => meanings.untrained_tokens?.[word] ?? "").join("; ")}>${untrained.map(why).join(", ")}</span>` },
    { name: "tokens", title: "Tokens", width: "5rem", cell: ({ id }) => html`<a href=${to(id, "tokens")}>show<span class="visually-hidden"> tokens of turn ${name(numbers, id)}</span></a>` },
  ];
  return html`<h2 class="samples-of">Turns of sample ${index}</h2>
    <div class="samples-turns"><${VirtualTable} columns=${columns} rows=${rows} keyOf=${(row) => row.id} label=${`Turns of sample ${index}`} /></div>`;
}

const name = (numbers, id) => numbers.get(id) ?? "?";
