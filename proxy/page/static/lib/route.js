// Where the reader is: `#/session/ID?turn=3`. Everything that a reader may want to send to somebody is in the address.
import { useEffect, useMemo, useState } from "./html.js";

/** {view, name, query}: the first part of the path, the rest of it decoded, and the query as an object. */
export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  const [view, ...rest] = path.split("/");
  return { view: view || "sessions", name: rest.map(decoded).join("/"), query: Object.fromEntries(new URLSearchParams(query)) };
}

/** The address of a view. Values that are null or "" are left out of the query. */
export function link(view, name = "", query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const path = name === "" ? view : `${view}/${name.split("/").map(encodeURIComponent).join("/")}`;
  return `#/${path}${given.length ? `?${new URLSearchParams(given)}` : ""}`;
}

export const go = (view, name, query) => {
  location.hash = link(view, name, query);
};

/** Like `go`, without an entry in the browser's history: for filters that change while somebody types. */
export const replace = (view, name, query) => {
  history.replaceState(null, "", link(view, name, query));
  dispatchEvent(new HashChangeEvent("hashchange"));
};

/** The route, kept up to date. */
export function useRoute() {
  const [hash, setHash] = useState(() => location.hash);
  useEffect(() => {
    const changed = () => setHash(location.hash);
    addEventListener("hashchange", changed);
    changed(); // an effect runs after the first drawing: nobody heard of an address that changed between the two
    return () => removeEventListener("hashchange", changed);
  }, []);
  return useMemo(() => parse(hash), [hash]);
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
