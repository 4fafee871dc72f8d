// The header: where one is, where one can go, whether the page is live, the theme, and the way out.
import { html } from "../lib/html.js";
import { useLive } from "../lib/live.js";
import { link } from "../lib/route.js";
import { ThemeSwitch } from "./theme_switch.js";

const TABS = [["sessions", "Sessions"], ["groups", "Groups"], ["overview", "Overview"], ["runs", "Runs"], ["training", "Training"]];
const LIVE = { on: "live", lost: "reconnecting…", off: "" };
const WITHIN = { session: "sessions", compare: "sessions" };

/** `view`: of the address; `logOut`: undefined if nobody is logged in. */
export function Header({ view, logOut }) {
  const tab = WITHIN[view] ?? view;
  return html`<header class="frame">
    <a class="brand" href=${link("sessions")}><${Grove} />Tokengrove</a>
    <nav aria-label="Views">
      ${TABS.map(([name, title]) => html`<a key=${name} href=${link(name)} aria-current=${tab === name ? "page" : undefined}>${title}</a>`)}
    </nav>
    <div class="frame-end">
      <${Live} />
      <${ThemeSwitch} />
      ${logOut && html`<button type="button" class="plain" onClick=${logOut}>Log out</button>`}
    </div>
  </header>`;
}

function Live() {
  const { state, detail } = useLive();
  return html`<span class=${`live live-${state}`} role="status" title=${detail || undefined}>
    ${state !== "off" && html`<span class="live-dot" aria-hidden="true"></span>`}${LIVE[state]}
  </span>`;
}

const Grove = () => html`<svg viewBox="0 0 16 16" aria-hidden="true">
  <path fill="none" stroke="currentColor" stroke-width="1.6" stroke-linecap="round" d="M8 15V8M8 10l4-3M8 12 4 9" />
  <g fill="currentColor"><circle cx="8" cy="4" r="2.6" /><circle cx="12.6" cy="6.4" r="1.8" /><circle cx="3.4" cy="8.4" r="1.8" /></g>
</svg>`;
