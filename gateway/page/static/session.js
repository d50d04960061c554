// Requests to the gateway.
//
//   call("POST", "/v1/models/a/unload")   the answer's JSON; throws an Error with the server's own words
//   ask("/v1/chat/completions", {...})    the Response itself, for streams; throws likewise
//   serverSentEvents(response.body)       yields {name, data} of a stream of server-sent events
//
// The page keeps one half of a session here, and the other half is a cookie. Servers on other ports of this host receive the
// cookie, too, but they cannot read this storage.

const KEPT = "modelctl-session";

function own() {
  const kept = localStorage.getItem(KEPT);
  return { "x-modelctl-page": /^[!-~]+$/.test(kept) ? kept : "1" }; // a header cannot hold what else may stand there
}

export async function ask(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { ...options, headers: { ...own(), ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("the gateway does not answer");
  }
  if (response.ok) return response;
  const said = await response.json().catch(() => null);
  const error = new Error(said?.error?.message || `the gateway answered ${response.status}`);
  error.status = response.status;
  throw error;
}

export async function call(method, path, body, options = {}) {
  const sent = body === undefined ? {} : { body: JSON.stringify(body), headers: { "content-type": "application/json" } };
  const response = await ask(path, { method, ...sent, ...options });
  return response.status === 204 ? null : response.json();
}

export async function signIn(token) {
  localStorage.setItem(KEPT, (await call("POST", "/page/sign-in", { token })).session);
}

export async function signOut() {
  await call("POST", "/page/sign-out");
  localStorage.removeItem(KEPT);
  location.reload();
}

// Another tab has signed in or out, perhaps as somebody else. Nothing of a session may be left for the next one: no text, no
// variable, and no answer that is still to come. A new document has none of them.
addEventListener("storage", (event) => {
  if (event.key === KEPT) location.reload();
});

export async function* serverSentEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const lines = event.split("\n");
      const [name, data] = ["event: ", "data: "].map((key) => lines.find((line) => line.startsWith(key))?.slice(key.length));
      if (!data || data === "[DONE]") continue;
      yield { name, data: JSON.parse(data) };
    }
  }
}
