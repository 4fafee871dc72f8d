// The server's HTTP API, as administrators call it. All of the page's requests go through here.
// The admin key stays in this tab: it is sent as a header, never in an address and never as a cookie.

const KEY = "tokengrove-admin-key";

/** An answer of the server that is an error. `status` 401 asks for the admin key. */
export class ApiError extends Error {
  constructor(status, message, param) {
    super(message);
    Object.assign(this, { status, param });
  }
}

export const adminKey = () => sessionStorage.getItem(KEY);
export const keepAdminKey = (key) => (key === null ? sessionStorage.removeItem(KEY) : sessionStorage.setItem(KEY, key));

/** A path of the API as `fetch` needs it: the page may be served under a prefix. */
export const address = (path) => new URL(path.replace(/^\//, ""), document.baseURI);

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
  const answer = await fetch(url, { cache: "no-store", ...options, headers });
  if (answer.ok) return answer;
  const { error } = await answer.json().catch(() => ({ error: { message: answer.statusText } }));
  throw new ApiError(answer.status, error.message, error.param);
}

function withQuery(path, query) {
  const url = address(path);
  for (const [name, value] of Object.entries(query)) if (value !== null && value !== undefined) url.searchParams.set(name, value);
  return url;
}
