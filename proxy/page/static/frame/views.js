// The views by their names in addresses. The one that is asked for is loaded first, the others while nothing happens.
import { html, useEffect, useState } from "../lib/html.js";
import { Failure } from "../lib/notice.js";

const LOAD = {
  sessions: () => import("../views/sessions/sessions_view.js").then((found) => found.SessionsView),
  groups: () => import("../views/groups/groups_view.js").then((found) => found.GroupsView),
  session: () => import("../views/session/session_view.js").then((found) => found.SessionView),
  compare: () => import("../views/compare/compare_view.js").then((found) => found.CompareView),
  runs: () => import("../views/runs/runs_view.js").then((found) => found.RunsView),
  training: () => import("../views/training/training_view.js").then((found) => found.TrainingView),
  overview: () => import("../views/overview/overview_view.js").then((found) => found.OverviewView),
};
const loaded = new Map();

/** Whether an address may name this view. */
export const isView = (name) => Object.hasOwn(LOAD, name);

/** Load a view; a promise of its component. */
export async function loadView(name) {
  if (!loaded.has(name)) loaded.set(name, await LOAD[name]());
  return loaded.get(name);
}

/** Load the views that may be asked for next. */
export function loadOthers() {
  const whenIdle = window.requestIdleCallback ?? setTimeout; // Safari has no idle callbacks
  whenIdle(() => Object.keys(LOAD).forEach((name) => loadView(name).catch(() => {})));
}

/** The component of a view; null while it is loaded, and one that says so if it cannot be. */
export function useView(name) {
  const [found, setFound] = useState({});
  useEffect(() => {
    let wanted = isView(name);
    const settle = (View) => wanted && setFound({ name, View });
    if (wanted) loadView(name).then((View) => settle(View), (error) => settle(missing(error)));
    return () => {
      wanted = false;
    };
  }, [name]);
  return loaded.get(name) ?? (found.name === name ? found.View : null);
}

const missing = (error) => () => html`<h1 class="visually-hidden">The view is missing</h1>
  <${Failure} what="Loading the view" error=${error} retry=${() => location.reload()} />`;
