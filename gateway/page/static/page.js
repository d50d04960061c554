// The page of a modelctl gateway. It shows what /page/events tells, and changes the document only where something changed,
// so that the focus and a screen reader stay where they are.

const by = (id) => document.getElementById(id);
const KEPT = "modelctl-session";
const SHOWN_S = 120;
const SLEEPING = ["falling_asleep", "asleep"];
const DOWN = ["stopped", "failed", "draining", "stopping"];
const USAGE_EVERY_MS = 10_000;

let picture = {};
let updates = null;
let usageWasRead = false;
let chosenModel = "";
const rates = new Map();
const templates = new Map(); // by model, whether it has a chat template. A model that starts again does not say so for a while

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  Object.assign(element, properties);
  element.append(...children);
  return element;
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function bytes(count) {
  return count === null || count === undefined ? "–" : `${(count / 2 ** 30).toFixed(count < 2 ** 30 ? 2 : 1)} GiB`;
}

function span(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

function inWords(state) {
  return state.replace("_", " ");
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the gateway answered ${response.status}`;
  }
}

function announce(text) {
  by("announcement").textContent = text;
}

function notice(text) {
  by("notice").hidden = !text;
  put(by("notice"), text || "");
}

// The headers of each request. The page keeps one half of the session here, and the other half is a cookie. Servers on other
// ports of this host receive the cookie, too, but they cannot read this storage.
function own() {
  return { "x-modelctl-page": localStorage.getItem(KEPT) || "1" };
}

// --- sign-in --------------------------------------------------------------------------------------------------------

function show(signedIn) {
  by("sign-in").hidden = signedIn;
  by("page").hidden = !signedIn;
  if (!signedIn) {
    by("sign-out").hidden = true;
    by("token").focus();
  }
}

by("sign-in-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  put(by("sign-in-error"), "");
  const response = await fetch("/page/sign-in", {
    method: "POST", headers: own(), body: JSON.stringify({ token: by("token").value }),
  });
  if (!response.ok) {
    put(by("sign-in-error"), await failure(response));
    return;
  }
  by("token").value = "";
  localStorage.setItem(KEPT, (await response.json()).session);
  connect();
});

by("sign-out").addEventListener("click", async () => {
  const response = await fetch("/page/sign-out", { method: "POST", headers: own() }).catch(() => null);
  if (!response?.ok) {
    notice(`Sign out: ${response ? await failure(response) : "the gateway does not answer"}`);
    return;
  }
  localStorage.removeItem(KEPT);
  location.reload();
});

// Nothing of a session may be left for the next one: no text, no variable, and no answer that is still to come. A new document
// has none of them.
function signedOut() {
  if (!by("page").hidden) {
    location.reload();
    return;
  }
  connection("waiting", "signed out");
  show(false);
}

// Another tab has signed in or out, perhaps as somebody else.
addEventListener("storage", (event) => {
  if (event.key === KEPT) location.reload();
});

// --- live updates ---------------------------------------------------------------------------------------------------

function connection(state, text) {
  by("connection").dataset.state = state;
  put(by("connection-text"), text);
}

async function connect() {
  updates?.abort();
  const mine = updates = new AbortController();
  let lost = "no connection to the gateway";
  try {
    const response = await fetch("/page/events", { headers: own(), signal: mine.signal });
    if (response.status === 401) {
      signedOut();
      return;
    }
    if (response.ok) {
      connection("live", "live");
      for await (const { name, data } of serverSentEvents(response.body)) {
        try {
          update(name, data);
        } catch (error) {
          reportError(error); // a fault of this script is no lost connection
        }
      }
    } else {
      lost = await failure(response);
    }
  } catch {
    // An aborted request, or a connection that has ended.
  }
  if (mine.signal.aborted) return;
  connection("lost", lost);
  setTimeout(() => mine === updates && connect(), 1000);
}

function update(name, data) {
  if (name === "picture") {
    picture = data;
    show(true);
  } else if (name === "change") {
    for (const [part, value] of Object.entries(data)) {
      if (value === null) delete picture[part];
      else picture[part] = value;
    }
  }
  draw();
}

// --- drawing --------------------------------------------------------------------------------------------------------

function draw() {
  by("sign-out").hidden = picture.auth !== "keys";
  notice(picture.trouble ? `The supervisor does not answer: ${picture.trouble}` : by("notice").dataset.order || "");
  if (picture.trouble) return;
  drawGpus();
  drawModels();
  drawRequests();
  drawEvents();
  drawChoices();
  if (!usageWasRead) readUsage();
  if (picture.admin && by("logs-section").hidden) readLog();
  by("logs-section").hidden = !picture.admin;
  by("events-section").hidden = !picture.events;
}

function workers() {
  return (picture.order || []).map((name) => picture[`model ${name}`]).filter(Boolean);
}

function drawGpus() {
  const gpus = picture.gpus || [];
  by("gpus-section").hidden = !gpus.length;
  keyed(by("gpus"), gpus, (gpu) => gpu.uuid, () => make("div", { className: "gpu" },
    make("strong"), bar(), make("p", { className: "bar-text" })), (element, gpu) => {
    const [title, shown, text] = element.children;
    put(title, `GPU ${gpu.index}`);
    const limit = gpu.limit_bytes ?? null;
    fill(shown, gpu.used_bytes / gpu.total_bytes, null, limit === null ? null : limit / gpu.total_bytes);
    put(text, `${bytes(gpu.used_bytes)} of ${bytes(gpu.total_bytes)} used, ${bytes(gpu.free_bytes)} free`
      + (limit === null ? "" : `, limit ${bytes(limit)}`));
  });
}

function bar() {
  return make("div", { className: "bar" }, make("i"), make("i", { className: "held" }), make("i", { className: "limit" }));
}

function fill(element, held, estimated, limit) {
  const [whole, own, mark] = element.children;
  const width = (share) => `${Math.min(100, Math.max(0, 100 * (share || 0))).toFixed(1)}%`;
  whole.style.width = width(estimated);
  own.style.width = width(held);
  mark.style.left = limit === null || limit === undefined ? "-9px" : width(limit);
}

// Have one child for each item, in this order. Children of items that stay are kept.
function keyed(parent, items, key, create, update) {
  const old = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let before = null;
  for (const item of items) {
    const name = String(key(item));
    let child = old.get(name);
    if (child) old.delete(name);
    else {
      child = create(item);
      child.dataset.key = name;
    }
    const place = before ? before.nextElementSibling : parent.firstElementChild;
    if (place !== child) parent.insertBefore(child, place);
    update(child, item);
    before = child;
  }
  for (const child of old.values()) child.remove();
}

function modelCard() {
  const card = make("article", { className: "model" });
  const line = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  line.setAttribute("viewBox", `0 0 ${SHOWN_S} 20`);
  line.setAttribute("preserveAspectRatio", "none");
  line.setAttribute("aria-hidden", "true");
  line.append(document.createElementNS("http://www.w3.org/2000/svg", "path"));
  const buttons = ["Start", "Stop", "Unload", "Sleep", "Reload"].map((name) =>
    make("button", { type: "button", className: name === "Stop" ? "danger" : "quiet", textContent: name }));
  card.append(
    make("header", {}, make("h3"), make("span", { className: "state" })),
    make("p", { className: "reason" }),
    make("div", { className: "rate" }, make("div", {}, make("strong"), make("span", { textContent: " tokens/s" })), line),
    make("div", {}, bar(), make("p", { className: "bar-text" })),
    make("p", { className: "facts" }),
    make("div", { className: "row" }, ...buttons),
  );
  buttons.forEach((button) => button.addEventListener("click", () => {
    const [verb, model] = [button.textContent.toLowerCase(), card.dataset.model];
    if (verb !== "stop" || mayStop(model)) order(verb, { model }, `${button.textContent} ${model}`);
  }));
  return card;
}

function drawModels() {
  const all = workers();
  keyed(by("models"), all, (worker) => worker.name, modelCard, drawModel);
  const ready = all.filter((worker) => worker.state === "ready").length;
  const asleep = all.filter((worker) => worker.state === "asleep").length;
  const failed = all.filter((worker) => worker.state === "failed").length;
  const speed = all.reduce((sum, worker) => sum + (worker.tokens_per_s || 0), 0);
  put(by("summary"), `${ready} of ${all.length} ready${asleep ? `, ${asleep} asleep` : ""}${failed ? `, ${failed} failed` : ""}`
    + (picture.supervisor ? `, ${Math.round(speed)} tokens/s` : ""));
}

function drawModel(card, worker) {
  const [head, reason, rate, memory, facts, row] = card.children;
  card.dataset.model = worker.model;
  card.className = `model ${worker.state}`;
  put(head.children[0], worker.name);
  const progress = worker.progress?.total ? ` ${Math.floor(100 * worker.progress.done / worker.progress.total)} %` : "";
  put(head.children[1], `${inWords(worker.state)}${progress}`);
  head.children[1].className = `state ${worker.state}`;
  const why = worker.reason || (["unloaded", "asleep"].includes(worker.state) ? worker.unloaded : "") || worker.description || "";
  reason.hidden = !why;
  put(reason, why);
  rate.hidden = worker.tokens_per_s === undefined;
  memory.hidden = !worker.vram_estimate_bytes && !worker.vram_bytes;
  put(rate.querySelector("strong"), (worker.tokens_per_s || 0).toFixed(worker.tokens_per_s < 100 ? 1 : 0));
  drawMemory(memory, worker);
  drawFacts(facts, worker);
  row.hidden = !picture.admin;
  const [start, stop, unload, sleep, reload] = row.children;
  start.disabled = !["stopped", "failed", "unloaded"].includes(worker.state);
  stop.disabled = ["stopped", "stopping", "unloaded"].includes(worker.state);
  unload.disabled = ["stopped", "failed", "draining", "stopping", "unloaded"].includes(worker.state);
  // One button for both orders, so that the focus stays on it when the model has fallen asleep.
  const sleeping = SLEEPING.includes(worker.state);
  put(sleep, sleeping ? "Wake" : "Sleep");
  sleep.hidden = !worker.can_sleep;
  sleep.disabled = !sleeping && worker.state !== "ready";
  reload.disabled = worker.state !== "ready";
  for (const button of row.children) button.setAttribute("aria-label", `${button.textContent} ${worker.name}`);
}

function drawMemory(element, worker) {
  const gpus = (picture.gpus || []).filter((gpu) => (worker.placed || []).includes(gpu.index));
  const total = gpus.reduce((sum, gpu) => sum + gpu.total_bytes, 0) || worker.vram_estimate_bytes || worker.vram_bytes;
  fill(element.children[0], worker.vram_bytes / total, worker.vram_estimate_bytes / total, null);
  put(element.children[1], `VRAM ${bytes(worker.vram_bytes)} held, ${bytes(worker.vram_estimate_bytes)} estimated`
    + (gpus.length ? `, ${bytes(total)} in all` : ""));
}

function drawFacts(element, worker) {
  const stats = worker.engine_stats || {};
  const facts = [["machine", worker.node], ["on", worker.gpu === "cpu" ? "CPU" : worker.gpu && `GPU ${worker.gpu}`],
    ["context", worker.context], ["running", worker.active], ["queued", worker.queued], ["restarts", worker.restarts || null],
    ["done", worker.totals?.finished], ["errors", worker.totals?.errors || null],
    ["from cache", stats.prompt_tokens ? `${Math.round(100 * (stats.cached_tokens || 0) / stats.prompt_tokens)} %` : null],
    ["pid", worker.pid]];
  if (worker.host_bytes) facts.push(["host memory", bytes(worker.host_bytes)]);
  if (typeof worker.wake_s === "number") facts.push(["last wake", `${worker.wake_s.toFixed(2)} s`]);
  if (worker.since) facts.push([`${inWords(worker.state)} for`, span(Date.now() / 1000 - worker.since)]);
  const shown = facts.filter(([, value]) => value !== null && value !== undefined && value !== "");
  keyed(element, shown, ([name]) => name.endsWith(" for") ? "state" : name,
    () => make("span", {}, document.createTextNode(""), make("b")), (item, [name, value]) => {
      if (item.firstChild.data !== `${name} `) item.firstChild.data = `${name} `;
      put(item.lastChild, String(value));
    });
}

function drawRequests() {
  const requests = picture.requests || [];
  by("requests").hidden = !requests.length;
  by("requests-none").hidden = requests.length > 0;
  put(by("requests-count"), requests.length ? `(${requests.length})` : "");
  keyed(by("requests").tBodies[0], requests, (request) => request.id, (request) => {
    const cancel = make("button", { type: "button", className: "quiet", textContent: "Cancel" });
    cancel.setAttribute("aria-label", `Cancel the request ${request.id} of ${request.model}`);
    cancel.addEventListener("click", () => order("cancel_request", { id: request.id }, `Cancel ${request.id}`));
    return make("tr", {}, make("td"), make("td"), make("td"), make("td", { className: "number" }),
      make("td", { className: "number" }), make("td", {}, cancel));
  }, (row, request) => {
    const place = request.state === "queued" && request.queue_position !== null ? ` (${request.queue_position + 1}.)` : "";
    put(row.children[0], request.worker || request.model);
    put(row.children[1], request.state + place);
    put(row.children[2], request.key || "–");
    put(row.children[3], String(request.tokens));
    put(row.children[4], span(request.age_ms / 1000));
  });
}

function drawEvents() {
  const events = [...(picture.events || [])].reverse();
  by("events-none").hidden = events.length > 0;
  keyed(by("events"), events, (event) => event.number, (event) => make("li", { className: event.level },
    make("time", { dateTime: new Date(event.time * 1000).toISOString(), textContent: new Date(event.time * 1000).toLocaleTimeString() }),
    make("span", { textContent: event.message })), () => {});
}

function drawChoices() {
  const names = [...new Set(workers().map((worker) => worker.model))];
  const option = (name) => make("option", { value: name, textContent: name });
  keyed(by("ask-model"), names, (name) => name, option, () => {});
  chooseModel(names);
  drawKinds();
  const logs = [["", "the supervisor"], ["gateway", "the gateway"], ...workers().map((worker) => [worker.name, worker.name])];
  keyed(by("log-of"), logs, ([name]) => name || "-", ([name, text]) => make("option", { value: name, textContent: text }), () => {});
}

// Until a person chooses, the choice is the first of the models that answer soonest, those with a chat template before others.
function chooseModel(names) {
  if (names.includes(chosenModel)) return;
  const rank = (name) => Math.max(...workers().filter((worker) => worker.model === name).map((worker) =>
    (worker.state === "ready" ? 4 : DOWN.includes(worker.state) ? 0 : 2) + (worker.chat ? 1 : 0)));
  const best = Math.max(...names.map(rank));
  if (names.length && rank(by("ask-model").value) < best) by("ask-model").value = names.find((name) => rank(name) === best);
}

// A model without a chat template can only complete a text.
function drawKinds() {
  for (const worker of workers()) if (typeof worker.chat === "boolean") templates.set(worker.model, worker.chat);
  const chat = by("ask-kind").options[0];
  const without = templates.get(by("ask-model").value) === false;
  if (chat.disabled === without) return;
  chat.disabled = without;
  put(chat, without ? "chat (no template)" : "chat");
  by("ask-kind").value = without ? "completion" : "chat";
}

by("ask-model").addEventListener("change", () => {
  chosenModel = by("ask-model").value;
  drawKinds();
});

// Once a second, also when nothing changed: the lines move on, and ages grow.
setInterval(() => {
  for (const worker of workers()) {
    const line = rates.get(worker.name) || [];
    line.push(worker.tokens_per_s || 0);
    if (line.length > SHOWN_S) line.shift();
    rates.set(worker.name, line);
    const card = [...by("models").children].find((child) => child.dataset.key === worker.name);
    if (!card) continue;
    const most = Math.max(1, ...line);
    const points = line.map((rate, i) => `${SHOWN_S - line.length + i} ${(19 - 18 * rate / most).toFixed(2)}`);
    card.querySelector("path").setAttribute("d", `M${points.join("L")}`);
    drawFacts(card.children[4], worker);
  }
}, 1000);

// --- orders and logs ------------------------------------------------------------------------------------------------

// A stop ends the requests that wait at once, and those that run when their time is over. So the page asks first.
function mayStop(model) {
  const count = (name) => workers().filter((worker) => worker.model === model)
    .reduce((most, worker) => name === "queued" ? Math.max(most, worker.queued || 0) : most + (worker.active || 0), 0);
  const [active, queued] = [count("active"), count("queued")];
  if (!active && !queued) return true;
  return confirm(`${model} has ${active} running and ${queued} queued requests. Stop it? Queued requests end with an error, `
    + "and running ones have a short time to finish.");
}

async function order(verb, parameters, said) {
  const response = await fetch(`/page/orders/${verb}`, { method: "POST", headers: own(), body: JSON.stringify(parameters) })
    .catch(() => null);
  const wrong = response?.ok ? "" : `${said}: ${response ? await failure(response) : "the gateway does not answer"}`;
  by("notice").dataset.order = wrong;
  notice(wrong);
  announce(wrong || `${said}: ordered`);
}

async function readLog() {
  const name = by("log-of").value;
  const response = await fetch(`/page/logs${name ? `?model=${encodeURIComponent(name)}` : ""}`, { headers: own() }).catch(() => null);
  if (!response?.ok) {
    put(by("log"), response ? await failure(response) : "the gateway does not answer");
    return;
  }
  put(by("log"), (await response.json()).lines.join("\n") || "(empty)");
  by("log").scrollTop = by("log").scrollHeight;
}

// --- usage ----------------------------------------------------------------------------------------------------------

const COUNTS = ["requests", "prompt_tokens", "cached_tokens", "completion_tokens"];

function usageRows(parent, rows) {
  const cells = () => [make("td"), make("td"), make("td"), ...COUNTS.map(() => make("td", { className: "number" }))];
  keyed(parent, rows, ({ labels }) => JSON.stringify(labels), () => make("tr", {}, ...cells()), (row, { labels, counts }) => {
    [...labels, ...COUNTS.map((name) => counts[name].toLocaleString())].forEach((text, i) => put(row.children[i], text));
  });
}

async function readUsage() {
  usageWasRead = true;
  const days = by("usage-days").value;
  const since = days && new Date(Date.now() - (days - 1) * 86400_000).toISOString().slice(0, 10);
  const response = await fetch(`/v1/usage${since ? `?since=${since}` : ""}`, { headers: own() }).catch(() => null);
  const answer = response?.ok ? await response.json() : null;
  const wrong = response ? response.ok ? "" : await failure(response) : "the gateway does not answer";
  if (days !== by("usage-days").value) return; // the answer for other days is on its way
  const rows = answer?.rows || [];
  by("usage").hidden = !rows.length;
  by("usage-none").hidden = rows.length > 0;
  put(by("usage-none"), wrong || "Nothing was counted on these days.");
  usageRows(by("usage").tBodies[0], rows.map((row) => ({ labels: [row.day, row.key || "–", row.model], counts: row })));
  const total = answer?.more ? "Total (not all rows are shown)" : "Total";
  usageRows(by("usage").tFoot, answer ? [{ labels: [total, "", ""], counts: answer.total }] : []);
}

// Other programs use the models, too. A tab that nobody sees does not ask.
function keepUsage() {
  if (usageWasRead && !document.hidden && by("connection").dataset.state === "live") readUsage();
}

setInterval(keepUsage, USAGE_EVERY_MS);
document.addEventListener("visibilitychange", keepUsage);
by("usage-days").addEventListener("change", readUsage);
by("usage-read").addEventListener("click", readUsage);

by("log-of").addEventListener("change", readLog);
by("log-read").addEventListener("click", readLog);

// --- playground -----------------------------------------------------------------------------------------------------

let conversation = [];
let running = null;

function turn(role, text) {
  const item = make("li", { className: role }, make("small", { textContent: role }), document.createTextNode(text));
  by("turns").append(item);
  by("turns").scrollTop = by("turns").scrollHeight;
  return item;
}

by("ask-text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) by("playground").requestSubmit();
});
by("ask-stop").addEventListener("click", () => running?.abort());
by("ask-clear").addEventListener("click", () => {
  running?.abort();
  conversation = [];
  by("turns").replaceChildren();
  put(by("ask-timings"), "");
});

// The number in a field. An empty field has none, so that the model's own value counts.
function filled(id) {
  return by(id).value === "" ? undefined : Number(by(id).value);
}

// Reasoning stands folded above its answer.
function reason(item, text) {
  if (item.children.length < 2) item.lastChild.before(make("details", {}, make("summary", { textContent: "Reasoning" }), make("p")));
  put(item.querySelector("p"), text);
}

// What the gateway measured. The speed is that of the answer alone: neither the wait for the model nor the prompt counts.
function timings(firstMs, usage, measured) {
  const waited = measured?.queue_ms >= 1 ? ` (${Math.round(measured.queue_ms)} ms of them waiting for the model)` : "";
  const parts = [`first token after ${Math.round(firstMs)} ms${waited}`];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (measured?.tokens_per_s) parts.push(`${measured.tokens_per_s.toFixed(1)} tokens/s`);
  return parts.join(", ");
}

by("playground").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  const text = by("ask-text").value;
  const chat = by("ask-kind").value === "chat";
  const before = conversation; // Clear begins another one, also while this answer comes
  chosenModel = by("ask-model").value;
  by("ask-text").value = "";
  put(by("ask-timings"), "");
  const question = turn("user", text);
  const body = {
    model: chosenModel, stream: true, stream_options: { include_usage: true },
    temperature: filled("ask-temperature"), max_tokens: filled("ask-tokens"),
    ...(chat ? { messages: [...before, { role: "user", content: text }] } : { prompt: text }),
  };
  running = new AbortController();
  by("ask-send").disabled = true;
  by("ask-stop").disabled = false;
  const begun = performance.now();
  let [first, item] = [null, null];
  let [answer, reasoning] = ["", ""];
  let [usage, measured] = [null, null];
  let whole = false;
  try {
    const response = await fetch(chat ? "/v1/chat/completions" : "/v1/completions", {
      method: "POST", headers: { ...own(), "content-type": "application/json" }, body: JSON.stringify(body), signal: running.signal,
    });
    if (!response.ok) throw new Error(await failure(response));
    item = turn("assistant", "");
    for await (const { data: chunk } of serverSentEvents(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const delta = chunk.choices[0]?.delta;
      const thought = delta?.reasoning_content ?? delta?.reasoning; // as gateway.reasoning_key names it
      const piece = chat ? delta?.content : chunk.choices[0]?.text;
      if (thought || piece) first ??= performance.now();
      if (thought) reason(item, reasoning += thought);
      if (piece) item.lastChild.data = answer += piece;
      if (thought || piece) by("turns").scrollTop = by("turns").scrollHeight;
      [usage, measured] = [chunk.usage || usage, chunk.timings || measured];
    }
    whole = true;
  } catch (error) {
    if (error.name !== "AbortError") turn("error", error.message);
  } finally {
    running = null;
    by("ask-send").disabled = false;
    by("ask-stop").disabled = true;
    if (before === conversation) {
      // The next question continues what is shown, also an answer that was cut off. A text without any answer is given back.
      if (!whole && first === null && !by("ask-text").value) {
        by("ask-text").value = text;
        question.remove();
        item?.remove();
      } else if (chat && (whole || first !== null)) {
        before.push({ role: "user", content: text },
          { role: "assistant", content: answer, ...(reasoning && { reasoning_content: reasoning }) });
      }
      if (first !== null) put(by("ask-timings"), timings(first - begun, usage, measured));
    }
    announce("The answer has ended.");
    readUsage();
  }
});

async function* serverSentEvents(body) {
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

connect();
