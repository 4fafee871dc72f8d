// The page: the frame, and within it the view that the address names, or the login.
import { Header } from "./frame/header.js";
import { Login, useLogin } from "./frame/login.js";
import { adminKey } from "./lib/api.js";
import { html, render, useEffect, useRef } from "./lib/html.js";
import { Empty } from "./lib/notice.js";
import { link, useRoute } from "./lib/route.js";
import { useTitle } from "./lib/title.js";
import { GroupsView } from "./views/groups/groups_view.js";
import { OverviewView } from "./views/overview/overview_view.js";
import { SessionView } from "./views/session/session_view.js";
import { SessionsView } from "./views/sessions/sessions_view.js";

const VIEWS = { sessions: SessionsView, groups: GroupsView, session: SessionView, overview: OverviewView };

function App() {
  const route = useRoute();
  const { asked, replaced, done, logOut } = useLogin();
  const View = Object.hasOwn(VIEWS, route.view) ? VIEWS[route.view] : Unknown;
  const place = `${route.view}/${route.name}`;
  const main = useFocusOnNavigation(`${place} ${asked}`);
  return html`
    <a class="skip" href="#main" onClick=${(event) => skip(event, main.current)}>Skip to the content</a>
    <${Header} view=${route.view} logOut=${adminKey() !== null && !asked ? logOut : undefined} />
    <main id="main" ref=${main} tabindex="-1">
      ${asked
        ? html`<${LoginView} replaced=${replaced} done=${done} />`
        : html`<${View} key=${route.view} name=${route.name} query=${route.query} />`}
    </main>
  `;
}

function LoginView(props) {
  useTitle("Log in");
  return html`<${Login} ...${props} />`;
}

function Unknown() {
  useTitle("Not found");
  return html`<h1 class="visually-hidden">Not found</h1>
    <${Empty} title="There is no such view"><a href=${link("sessions")}>All sessions</a><//>`;
}

/** After a change of `place` the focus goes to the heading of what is shown now, so that a screen reader says it. */
function useFocusOnNavigation(place) {
  const main = useRef(null);
  const before = useRef(place);
  useEffect(() => {
    if (before.current === place) return;
    before.current = place;
    const target = main.current.querySelector("h1") ?? main.current;
    if (main.current.contains(document.activeElement)) return; // the view has put it somewhere itself
    target.tabIndex = -1;
    target.focus({ preventScroll: true });
    main.current.scrollTop = 0;
  }, [place]);
  return main;
}

/** The address belongs to the router, so the link moves the focus itself. */
function skip(event, main) {
  event.preventDefault();
  main.focus();
}

render(html`<${App} />`, document.getElementById("app"));
