// A person's reward: for the chosen turn, or for the session. The key r opens the form. What a reward replaces is said
// before it is sent, and read again, since others may have set one meanwhile.
import { inPath, post } from "../../lib/api.js";
import { reward } from "../../lib/format.js";
import { html, useEffect, useRef, useState } from "../../lib/html.js";
import { keep, kept } from "../../lib/kept.js";
import { Notice, reason } from "../../lib/notice.js";
import { printable } from "../../lib/printable.js";
import { useKeys } from "../../lib/keys.js";
import { replaced, rewardBody } from "./reward_words.js";
import { readTurn } from "./turn/read_turn.js";

const NAME = "tokengrove-reward-name";

/**
 * `name`: the session id; `node`: the turn that is rewarded; `whole`: whether it stands for the session, of which `score` was
 * set at its end, or null; `reload` reads the session again.
 */
export function RewardForm({ name, node, whole, score, reload }) {
  const [open, setOpen] = useState(false);
  const [said, setSaid] = useState(null);
  useKeys({ r: () => setOpen(true) });
  useEffect(() => setSaid(null), [node.interaction_id]);
  const done = (what) => {
    setOpen(false);
    setSaid(what);
    reload();
  };
  return html`<div class="session-reward">
    ${open
      ? html`<${Form} key=${whole ? "" : node.interaction_id} name=${name} node=${node} whole=${whole} score=${score} reload=${reload} done=${done} close=${() => setOpen(false)} />`
      : html`<button type="button" class="plain small" onClick=${() => setOpen(true)}>Reward ${subject(node, whole)}… <kbd>r</kbd></button>`}
    <span class="small" role="status">${said ?? ""}</span>
  </div>`;
}

const subject = (node, whole) => (whole ? "the session" : `turn ${node.turn}`);

function Form({ name, node, whole, score, reload, done, close }) {
  const [value, setValue] = useState("");
  const [typed, setTyped] = useState(() => kept(NAME) ?? "");
  const [problem, setProblem] = useState(null);
  const [waiting, setWaiting] = useState(false);
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const own = typed.trim();
  const before = replaced(node, own);
  const send = async (event) => {
    event.preventDefault();
    if (waiting) return;
    setWaiting(true);
    keep(NAME, own);
    const found = await set(name, node, Number(value), own).then((now) => now, (error) => printable(reason(error)));
    setWaiting(false);
    if (found === null) return done(`Reward ${reward(Number(value))} set${own ? ` as ${printable(own)}` : ""}.`);
    setProblem(found);
    reload();
  };
  return html`<form class="session-reward-form card" aria-label=${`Reward ${subject(node, whole)}`} onSubmit=${send}
    onKeyDown=${(event) => event.key === "Escape" && close()}>
    <label>Reward of ${subject(node, whole)}<input ref=${field} type="number" step="any" required value=${value} onInput=${(event) => setValue(event.target.value)} /></label>
    <label title="A named reward stands beside the main one">Name (optional)<input value=${typed} maxlength="64" spellcheck=${false} placeholder="yours, or human" onInput=${(event) => setTyped(event.target.value)} /></label>
    <button type="submit" class="primary" disabled=${waiting}>${before === null ? "Set" : "Replace"}</button>
    <button type="button" class="plain" onClick=${close}>Cancel</button>
    <p class="small quiet">${whole && `It goes to turn ${node.turn}, the last of the main agent. `}${before !== null && html`<strong>It replaces ${reward(before)}.</strong> `}
      ${own ? "A named reward says who gave it, and leaves the main one as it is." : "Trainers get it as the reward."}
      ${!own && score !== null && html` <strong>The score of the session stays ${reward(score)}</strong>, which was set at its end.`}</p>
    ${problem && html`<${Notice} kind="bad" title="The reward was not set." text=${problem} />`}
  </form>`;
}

/** Set a reward. Null, or why it was not: another one was set since the turn was read. Throws ApiError. */
async function set(name, node, value, own) {
  const now = replaced(await readTurn(name, node.interaction_id, "times"), own);
  if (now !== replaced(node, own)) return `Meanwhile it was ${now === null ? "removed" : `set to ${reward(now)}`}. Send yours again if it is to replace that.`;
  await post(`${inPath(name)}/rl/set_reward`, rewardBody(node, value, own));
  return null;
}
