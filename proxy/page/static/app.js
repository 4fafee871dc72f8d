// The page: the frame with its navigation, and the view that the address names.
import { html, render } from "./lib/html.js";
import { link, useRoute } from "./lib/route.js";
import { GroupsView } from "./views/groups/groups_view.js";
import { OverviewView } from "./views/overview/overview_view.js";
import { SessionView } from "./views/session/session_view.js";
import { SessionsView } from "./views/sessions/sessions_view.js";

const VIEWS = { sessions: SessionsView, groups: GroupsView, session: SessionView, overview: OverviewView };
const TABS = [["sessions", "Sessions"], ["groups", "Groups"], ["overview", "Overview"]];

function App() {
  const route = useRoute();
  const View = VIEWS[route.view] ?? SessionsView;
  return html`
    <header class="frame">
      <a class="brand" href=${link("sessions")}>Tokengrove</a>
      <nav aria-label="Views">
        ${TABS.map(([view, title]) => html`<a href=${link(view)} aria-current=${route.view === view ? "page" : undefined}>${title}</a>`)}
      </nav>
    </header>
    <main><${View} name=${route.name} query=${route.query} /></main>
  `;
}

render(html`<${App} />`, document.getElementById("app"));
