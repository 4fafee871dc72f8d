// Saves a session as files: everything that the API has of it, or its training samples.
import { address, inPath, post, request } from "../../../lib/api.js";
import { download } from "../../../lib/download.js";
import { html, useState } from "../../../lib/html.js";
import { reason } from "../../../lib/notice.js";
import { printable } from "../../../lib/printable.js";

const WHOLE = "added,logprobs,reply,times,compared,score";
const LAYOUTS = ["concat", "individual", "tree"];

/** `sessionId`: whose files. */
export function Downloads({ sessionId }) {
  const [layout, setLayout] = useState(LAYOUTS[0]);
  const [state, setState] = useState(null);
  const save = (what, load) => async () => {
    setState({ text: `${what}: loading…` });
    try {
      await load();
      setState({ text: `${what}: saved` });
    } catch (error) {
      setState({ text: `${what} could not be saved: ${printable(reason(error))}`, bad: true });
    }
  };
  const samples = (format) => save(`export (${format})`, () => saveSamples(sessionId, layout, format));
  return html`<div class="turn-group" role="group" aria-label="Download">
    <span class="small quiet" aria-hidden="true">Download</span>
    <button type="button" class="turn-button" title="The session with all its turns" onClick=${save("session", () => saveSession(sessionId))}>session JSON</button>
    <label class="small quiet" for="turn-layout">export</label>
    <select id="turn-layout" title="The layout of its training samples" value=${layout} onChange=${(event) => setLayout(event.currentTarget.value)}>
      ${LAYOUTS.map((name) => html`<option key=${name}>${name}</option>`)}
    </select>
    <button type="button" class="turn-button" title="Its training samples as JSON" onClick=${samples("json")}>JSON</button>
    <button type="button" class="turn-button" title="Its training samples as npz, for numpy" onClick=${samples("npz")}>npz</button>
    <span role="status" class=${`small turn-said ${state?.bad ? "bad" : "quiet"}`}>${state?.text}</span>
  </div>`;
}

// The answers go into the files byte for byte. The browser keeps a large one on its disk as it comes.

async function saveSession(sessionId) {
  const url = address(`rl/sessions/${inPath(sessionId)}`);
  url.searchParams.set("include", WHOLE);
  download(await (await request(url)).blob(), `${sessionId}.json`);
}

async function saveSamples(sessionId, layout, format) {
  const answer = await post("trajectories/export", { session_id: sessionId, layout, format });
  download(await answer.blob(), `${sessionId}.${layout}.${format}`);
}
