// A person's reward: for the chosen turn, or for the session. The key r opens the form.
import { inPath, post } from "../../lib/api.js";
import { reward } from "../../lib/format.js";
import { html, useEffect, useRef, useState } from "../../lib/html.js";
import { Notice, reason } from "../../lib/notice.js";
import { printable } from "../../lib/printable.js";
import { useKeys } from "../../lib/keys.js";

const NAME = "tokengrove-reward-name";

/** `name`: the session id; `node`: the turn that the address names, undefined for the session; `reload` reads it again. */
export function RewardForm({ name, node, reload }) {
  const [open, setOpen] = useState(false);
  const [said, setSaid] = useState(null);
  useKeys({ r: () => setOpen(true) });
  useEffect(() => setSaid(null), [node?.interaction_id]);
  const done = (what) => {
    setOpen(false);
    setSaid(what);
    reload();
  };
  return html`<div class="session-reward">
    ${open
      ? html`<${Form} key=${node?.interaction_id} name=${name} node=${node} done=${done} close=${() => setOpen(false)} />`
      : html`<button type="button" class="plain small" onClick=${() => setOpen(true)}>Reward ${subject(node)}… <kbd>r</kbd></button>`}
    <span class="small" role="status">${said ?? ""}</span>
  </div>`;
}

const subject = (node) => (node ? `turn ${node.turn}` : "the session");

function Form({ name, node, done, close }) {
  const [value, setValue] = useState("");
  const [own, setOwn] = useState(keptName);
  const [problem, setProblem] = useState(null);
  const [waiting, setWaiting] = useState(false);
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const before = node ? (own ? node.rewards?.[own] : node.reward) ?? null : null;
  const send = async (event) => {
    event.preventDefault();
    setWaiting(true);
    const body = { reward: Number(value), ...(own ? { name: own } : {}), ...(node ? { interaction_id: node.interaction_id } : {}) };
    const failed = await post(`${inPath(name)}/rl/set_reward`, body).then(() => null, (error) => error);
    setWaiting(false);
    keepName(own);
    if (failed) setProblem(printable(reason(failed)));
    else done(`Reward ${reward(body.reward)} set${own ? ` as ${own}` : ""}.`);
  };
  return html`<form class="session-reward-form card" aria-label=${`Reward ${subject(node)}`} onSubmit=${send}
    onKeyDown=${(event) => event.key === "Escape" && close()}>
    <label>Reward of ${subject(node)}<input ref=${field} type="number" step="any" required value=${value} onInput=${(event) => setValue(event.target.value)} /></label>
    <label title="A named reward stands beside the main one">Name (optional)<input value=${own} maxlength="64" spellcheck=${false} placeholder="such as human" onInput=${(event) => setOwn(event.target.value.trim())} /></label>
    <button type="submit" class="primary" disabled=${waiting}>${before === null ? "Set" : "Replace"}</button>
    <button type="button" class="plain" onClick=${close}>Cancel</button>
    <p class="small quiet">${before === null ? (node ? "" : "It goes to the last complete turn of the main agent.") : `It replaces ${reward(before)}.`}
      ${own ? "" : " Trainers get it as the reward."}</p>
    ${problem && html`<${Notice} kind="bad" title="The reward was not set." text=${problem} />`}
  </form>`;
}

function keptName() {
  try {
    return localStorage.getItem(NAME) ?? "";
  } catch {
    return ""; // storage may be forbidden
  }
}

function keepName(name) {
  try {
    localStorage.setItem(NAME, name);
  } catch {
    // then it is typed again next time
  }
}
