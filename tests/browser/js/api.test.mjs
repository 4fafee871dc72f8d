// Addresses of the API: whatever a session is called, they lead to this server.
import assert from "node:assert/strict";
import test from "node:test";
import { address, inPath } from "../../../proxy/page/static/lib/api.js";

globalThis.document = { baseURI: "http://127.0.0.1:8080/prefix/" };

test("a path is below the prefix that the page is served under", () => {
  assert.equal(String(address("/rl/sessions")), "http://127.0.0.1:8080/prefix/rl/sessions");
  assert.equal(String(address("rl/sessions")), "http://127.0.0.1:8080/prefix/rl/sessions");
});

test("a session whose name looks like an address of another host leads nowhere else", () => {
  for (const name of ["https:evil.com", "https:user@evil.com/x", "a:b", "http:evil.com"]) {
    const found = address(`/${name}/v1/chat/completions`);
    assert.equal(String(found), `http://127.0.0.1:8080/prefix/${name}/v1/chat/completions`);
    assert.equal(address(`/rl/sessions/${inPath(name)}`).host, "127.0.0.1:8080");
  }
});
