// The server's HTTP API, as administrators and readers call it. All of the page's requests go through here.
// The key stays in this tab: it is sent as a header, never in an address and never as a cookie.

const KEY = "tokengrove-admin-key";

/** An answer of the server that is an error. `status` 401 asks for the key; `code` is that of the API. */
export class ApiError extends Error {
  constructor(status, message, param, code) {
    super(message);
    Object.assign(this, { status, param, code });
  }
}

export const adminKey = () => sessionStorage.getItem(KEY);

/** Keep the key in this tab, or forget it (null). */
export function keepAdminKey(key) {
  if (key === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, key);
}

/** Whether an error says that the key is missing, or that `key`, which was sent, is not (or no longer) one that reads. */
const refuses = (error, key) =>
  error instanceof ApiError && (error.status === 401 || (error.status === 403 && key !== null && error.code !== "read_only_key"));

/** Ask the server whether it takes a key (null: none). Resolves if it does; throws ApiError, or TypeError without a server. */
export async function tryKey(key) {
  const headers = key === null ? {} : { authorization: `Bearer ${key}` };
  await checked(await fetch(withQuery("rl/sessions", { limit: 1 }), { cache: "no-store", headers }));
}

/**
 * A path of the API as `fetch` needs it: the page may be served under a prefix. Without "./" a path that begins with a
 * session called `https:evil.com` would be an address of that host.
 */
export const address = (path) => new URL(`./${path.replace(/^\//, "")}`, document.baseURI);

/** GET a path with query parameters (null and undefined are left out); the JSON of the answer. */
export async function get(path, query = {}, { signal } = {}) {
  return (await request(withQuery(path, query), { signal })).json();
}

/** POST a JSON body; the answer itself. */
export const post = (path, body, { signal } = {}) =>
  request(address(path), { method: "POST", body: JSON.stringify(body), headers: { "content-type": "application/json" }, signal });

/** A session id as the API's paths have it: slashes stay. */
export const inPath = (sessionId) => sessionId.split("/").map(encodeURIComponent).join("/");

/** Send a request with the admin key. Throws ApiError for an answer that is an error. */
export async function request(url, options = {}) {
  const key = adminKey();
  const headers = { ...options.headers, ...(key === null ? {} : { authorization: `Bearer ${key}` }) };
  try {
    return await checked(await fetch(url, { cache: "no-store", ...options, headers }));
  } catch (error) {
    // A key that was replaced in the meantime (a login, a log out) says nothing about the one of now.
    if (refuses(error, key) && adminKey() === key) dispatchEvent(new CustomEvent("keyrefused", { detail: error }));
    throw error;
  }
}

async function checked(answer) {
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  throw new ApiError(answer.status, body?.error?.message ?? `The server answered ${answer.status} ${answer.statusText}`, body?.error?.param, body?.error?.code);
}

function withQuery(path, query) {
  const url = address(path);
  for (const [name, value] of Object.entries(query)) if (value !== null && value !== undefined) url.searchParams.set(name, value);
  return url;
}
