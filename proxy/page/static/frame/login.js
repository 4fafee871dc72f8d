// The login: asks for the admin key or a reader's key when the server wants one.
import { adminKey, keepAdminKey, tryKey } from "../lib/api.js";
import { html, useEffect, useRef, useState } from "../lib/html.js";
import { Notice, reason } from "../lib/notice.js";

/** {asked, replaced, done, logOut}: whether the server asks for a key, and whether one that it took before is refused now. */
export function useLogin() {
  const [state, setState] = useState({ asked: false, replaced: false });
  useEffect(() => {
    const refused = () => {
      setState({ asked: true, replaced: adminKey() !== null });
      keepAdminKey(null);
    };
    addEventListener("keyrefused", refused);
    return () => removeEventListener("keyrefused", refused);
  }, []);
  const logOut = () => {
    keepAdminKey(null);
    setState({ asked: true, replaced: false });
  };
  return { ...state, done: () => setState({ asked: false, replaced: false }), logOut };
}

/** `replaced`: a key that was good is refused now. `done` is called once the server took the key, which is then kept. */
export function Login({ replaced, done }) {
  const [key, setKey] = useState("");
  const [problem, setProblem] = useState(replaced ? "The server no longer takes the key of this tab. It was replaced." : null);
  const [waiting, setWaiting] = useState(false);
  const field = useRef(null);
  useEffect(() => field.current.focus(), []);
  const send = async (event) => {
    event.preventDefault();
    if (waiting) return;
    setWaiting(true);
    const failed = await tryKey(key.trim()).then(() => null, (error) => error);
    setWaiting(false);
    if (failed === null) {
      keepAdminKey(key.trim());
      done();
    } else {
      setProblem(wrong(failed, key.trim()));
      field.current.focus();
      field.current.select();
    }
  };
  return html`<form class="login card" onSubmit=${send} aria-labelledby="login-title">
    <h1 id="login-title">Log in</h1>
    <p class="quiet">This server has an admin key: the value of <code>--admin-key</code> or <code>TOKENGROVE_ADMIN_KEY</code>.
      A reader's key (<code>--reader-key</code>) shows the same, and changes nothing. The key stays in this tab and is forgotten when the tab is closed.</p>
    ${problem && html`<${Notice} kind="bad" text=${problem} />`}
    <input class="visually-hidden" type="text" name="username" autocomplete="username" value="admin" tabindex="-1" aria-hidden="true" readonly />
    <div class="field">
      <label for="admin-key">Admin key or reader key</label>
      <input id="admin-key" ref=${field} type="password" name="password" autocomplete="current-password" required spellcheck=${false}
        autocapitalize="off" aria-invalid=${problem ? "true" : undefined} value=${key} onInput=${(event) => setKey(event.target.value)} />
    </div>
    <button type="submit" class="primary" disabled=${waiting}>${waiting ? "Asking the server…" : "Log in"}</button>
  </form>`;
}

function wrong(error, key) {
  if (error instanceof TypeError) return /[^\x20-\x7e]/.test(key) ? "A key has ASCII characters only." : reason(error);
  if (error.status !== 401 && error.status !== 403) return error.message;
  return "This is not the admin key or a reader key. The api_key or control_key of a session does not open this page.";
}
