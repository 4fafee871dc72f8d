// The page: the frame, and within it the view that the address names, or the login.
import { Header } from "./frame/header.js";
import { Login, useLogin } from "./frame/login.js";
import { isView, loadOthers, loadView, useView } from "./frame/views.js";
import { adminKey } from "./lib/api.js";
import { html, render, useEffect, useRef } from "./lib/html.js";
import { Empty, Waiting } from "./lib/notice.js";
import { link, parse, useRoute } from "./lib/route.js";
import { useTitle } from "./lib/title.js";

function App() {
  const route = useRoute();
  const { asked, replaced, done, logOut } = useLogin();
  const found = useView(route.view);
  const View = isView(route.view) ? found : Unknown;
  const main = useFocusOnNavigation(View === null ? null : `${route.view}/${route.name} ${asked}`);
  return html`
    <a class="skip" href="#main" onClick=${(event) => skip(event, main.current)}>Skip to the content</a>
    <${Header} view=${route.view} logOut=${adminKey() !== null && !asked ? logOut : undefined} />
    <main id="main" ref=${main} tabindex="-1">
      ${asked
        ? html`<${LoginView} replaced=${replaced} done=${done} />`
        : View === null
          ? html`<${Waiting} />`
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

/**
 * After a change of `place` (null: it is not there yet) the focus goes to the heading of what is shown now, so that a
 * screen reader says it.
 */
function useFocusOnNavigation(place) {
  const main = useRef(null);
  const before = useRef(place);
  useEffect(() => {
    if (place === null || place === before.current) return;
    const first = before.current === null;
    before.current = place;
    const focused = document.activeElement;
    if (first || (focused !== main.current && main.current.contains(focused))) return; // the view has put it somewhere
    const target = main.current.querySelector("h1") ?? main.current;
    focusOn(target);
    main.current.scrollTop = 0;
    return keepFocus(main.current, target);
  }, [place]);
  return main;
}

function focusOn(heading) {
  heading.tabIndex = -1;
  heading.focus({ preventScroll: true });
}

/** A view that still loads may draw another heading in the place of the one with the focus: it gets the focus then. */
function keepFocus(main, target) {
  let heading = target;
  const watcher = new MutationObserver(() => {
    const lost = !heading.isConnected || heading === main;
    const found = lost && [document.body, main].includes(document.activeElement) ? main.querySelector("h1") : null;
    if (found) focusOn((heading = found));
  });
  watcher.observe(main, { childList: true, subtree: true });
  return () => watcher.disconnect();
}

/** The address belongs to the router, so the link moves the focus itself. */
function skip(event, main) {
  event.preventDefault();
  main.focus();
}

const { view } = parse(location.hash);
if (isView(view)) loadView(view).then(loadOthers, () => {}); // before anything is drawn
render(html`<${App} />`, document.getElementById("app"));
