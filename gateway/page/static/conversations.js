// The conversations of the view Chat, and the requests for their answers.
//
// They are kept in this browser only. Each one is an entry of localStorage, and its name has the session's key, so another
// person who signs in at this browser does not see it. An answer goes on while another view is shown.
//
// A conversation: { id, title, changed, model, system, options, tools, turns, draft (what stands in the field) }, and, not
// kept: editing (the number of the user's turn that the draft replaces), error.
// A turn: { role: "user", content } or { role: "assistant", model, content, reasoning, calls, plain, ended, error, timings }.
// A turn is never changed but replaced, so components need not compare what is in it.

import { announce, drawing } from "./ui.js";
import { ask, serverSentEvents } from "./session.js";

const KEPT = ["id", "title", "changed", "model", "system", "options", "tools", "turns"];
const UNFINISHED = ["stopped", "length", "failed"]; // how an answer ended that can be continued
const BREATH = 3; // the page rests this many times as long as it has drawn an answer

const store = { key: null, chats: [], full: false };
const running = new Map(); // by conversation, { stop, show }
const [useDrawn, changed] = drawing();

const prefix = () => `modelctl-chat ${store.key} `;
const sort = () => store.chats.sort((a, b) => b.changed - a.changed);

const areTexts = (values) => values.every((value) => typeof value === "string");
const isCall = (call) => areTexts([call.name, call.arguments]);
const isTurn = (turn) => areTexts([turn.content]) && (turn.role === "user" || (turn.calls.every(isCall)
  && areTexts([turn.model, turn.reasoning, turn.ended, turn.error, turn.timings])));

// Return a conversation of the storage; null for an entry that was damaged. It would end the page, and not this view alone.
function load(name) {
  try {
    const { id, title, changed, model, system, options, tools, turns, draft } = JSON.parse(localStorage.getItem(name));
    const sound = areTexts([id, title, model, system, tools, draft, ...Object.values(options)]) && turns.every(isTurn);
    return sound && name === prefix() + id ? { ...fresh(), id, title, changed: Number(changed), model, system, options, tools, turns, draft } : null;
  } catch {
    return null;
  }
}

// Return the conversations of a key, the newest first, and whether the storage is full.
export function useConversations(key) {
  useDrawn();
  if (store.key !== key) {
    store.key = key;
    store.chats = Object.keys(localStorage).filter((name) => name.startsWith(prefix())).map(load).filter(Boolean);
    sort();
  }
  return store;
}

// Another tab of the same person has changed a conversation.
addEventListener("storage", (event) => {
  if (store.key === null || !event.key?.startsWith(prefix())) return;
  const id = event.key.slice(prefix().length);
  const known = store.chats.find((chat) => chat.id === id);
  if (running.has(known)) return;
  const chat = load(event.key);
  if (known && chat) Object.assign(known, Object.fromEntries(KEPT.map((part) => [part, chat[part]])));
  else store.chats = chat ? [...store.chats, chat] : store.chats.filter((one) => one !== known);
  sort();
  changed();
});

// What has come of an answer is kept when the tab closes. A question without an answer can be asked again.
addEventListener("pagehide", () => {
  for (const [chat, { show }] of running) {
    show("stopped");
    save(chat);
  }
});

export function fresh() {
  const id = Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, title: "", changed: 0, model: "", system: "", options: {}, tools: "", turns: [], draft: "", editing: null, error: "" };
}

export const kept = (chat) => Object.fromEntries(KEPT.map((part) => [part, chat[part]]));

export function save(chat) {
  if (!store.chats.includes(chat)) return; // it was deleted while its answer came
  chat.changed = Date.now();
  sort();
  try {
    localStorage.setItem(prefix() + chat.id, JSON.stringify({ ...kept(chat), draft: chat.draft }));
    store.full = false;
  } catch { // QuotaExceededError. The conversation stays as it is, in this tab
    store.full = true;
  }
  changed();
}

// Change a conversation. It is kept from its first message on.
export function set(chat, parts) {
  Object.assign(chat, parts);
  if (store.chats.includes(chat) && KEPT.some((part) => part in parts)) save(chat);
  else changed();
}

export function remove(chat) {
  stop(chat);
  store.chats = store.chats.filter((one) => one !== chat);
  localStorage.removeItem(prefix() + chat.id);
  store.full = false;
  changed();
}

export const isRunning = (chat) => running.has(chat);
export const stop = (chat) => running.get(chat)?.stop();
export const canContinue = (turn) => UNFINISHED.includes(turn.ended) && !turn.calls.length && Boolean(turn.content);

function message({ role, content, reasoning, calls }) {
  if (role === "user") return { role, content };
  const called = calls.map(({ id, ...call }) => ({ id, type: "function", function: call }));
  return { role, content, ...(reasoning && { reasoning_content: reasoning }), ...(called.length && { tool_calls: called }) };
}

function body(chat, asked, begun, plain) {
  const options = Object.entries(chat.options).filter(([, value]) => value !== "")
    .map(([name, value]) => [name, name === "reasoning_effort" ? value : Number(value)]);
  const shared = { model: chat.model, stream: true, stream_options: { include_usage: true }, ...Object.fromEntries(options) };
  if (plain) return { ...shared, prompt: asked.at(-1).content + begun.content };
  const system = chat.system.trim() ? [{ role: "system", content: chat.system }] : [];
  const messages = [...system, ...asked.map(message)];
  const tools = chat.tools.trim() ? { tools: JSON.parse(chat.tools) } : {};
  return begun.content ? { ...shared, ...tools, messages: [...messages, message(begun)], continue_final_message: true }
    : { ...shared, ...tools, messages };
}

// What the gateway measured. The speed is that of the answer alone: neither the wait for the model nor the prompt counts.
function timings(firstMs, usage, measured) {
  const waited = measured?.queue_ms >= 1 ? ` (${Math.round(measured.queue_ms)} ms of them waiting for the model)` : "";
  const parts = [`first token after ${Math.round(firstMs)} ms${waited}`];
  if (usage) parts.push(`${usage.completion_tokens} tokens`);
  if (measured?.tokens_per_s) parts.push(`${measured.tokens_per_s.toFixed(1)} tokens/s`);
  return parts.join(", ");
}

function take(turn, { content, reasoning_content, reasoning, tool_calls }) {
  turn.content += content || "";
  turn.reasoning += reasoning_content ?? reasoning ?? ""; // as gateway.reasoning_key names it
  for (const { index, id, function: part } of tool_calls || []) {
    const call = turn.calls[index] ||= { id: "", name: "", arguments: "" };
    call.id ||= id || "";
    call.name += part?.name || "";
    call.arguments += part?.arguments || "";
  }
  return Boolean(content || reasoning_content || reasoning || tool_calls?.length);
}

// Ask for the next turn of a conversation.
//   asked   the turns that are sent, the last one a user's
//   begun   the answer that is continued, if there is one
//   plain   the model completes a text, because it has no chat template
// If no answer comes, the conversation is again what it was before, and ``draft`` is given back.
export async function answer(chat, asked, { begun, plain, draft = chat.draft }) {
  const before = { turns: chat.turns, editing: chat.editing };
  const aborted = new AbortController();
  const turn = { role: "assistant", reasoning: "", content: "", calls: [], ...begun, plain, model: chat.model, ended: "", error: "", timings: "" };
  const sent = performance.now();
  let [first, usage, measured, frame, next] = [null, null, null, null, 0];
  const show = (ended = "", error = "") => {
    chat.turns = first === null && !begun ? asked : [...asked, { ...turn, ended, error }];
    changed();
  };
  // A long answer takes longer to draw. What else happens in the page must not wait for it.
  const draw = (now) => {
    frame = now < next ? requestAnimationFrame(draw) : null;
    if (frame) return;
    show();
    setTimeout(() => next = performance.now() + BREATH * (performance.now() - now));
  };
  running.set(chat, { stop: () => aborted.abort(), show });
  Object.assign(chat, { draft: "", editing: null, error: "", title: chat.title || asked[0].content.trim().replace(/\s+/g, " ").slice(0, 60) });
  if (!store.chats.includes(chat)) store.chats.push(chat);
  show();
  save(chat);
  let [ended, error] = ["", ""];
  try {
    const response = await ask(plain ? "/v1/completions" : "/v1/chat/completions", {
      method: "POST", headers: { "content-type": "application/json" }, signal: aborted.signal,
      body: JSON.stringify(body(chat, asked, turn, plain)),
    });
    for await (const { data: chunk } of serverSentEvents(response.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      const choice = chunk.choices[0];
      if (choice && take(turn, plain ? { content: choice.text } : choice.delta)) {
        first ??= performance.now();
        frame ??= requestAnimationFrame(draw);
      }
      if (choice?.finish_reason) ended = choice.stop_reason === "loop" ? "loop" : choice.finish_reason;
      [usage, measured] = [chunk.usage || usage, chunk.timings || measured];
    }
    if (!ended) throw new Error("the connection to the gateway has ended");
  } catch (thrown) {
    [ended, error] = thrown.name === "AbortError" ? ["stopped", ""] : ["failed", thrown.message];
  }
  cancelAnimationFrame(frame);
  running.delete(chat);
  if (first !== null) turn.timings = timings(first - sent, usage, measured);
  if (first !== null || !["stopped", "failed"].includes(ended)) {
    first ??= sent; // an answer without any text is one, too
    show(ended, error);
  } else Object.assign(chat, before, { draft: chat.draft || draft, error });
  save(chat);
  announce(error || "The answer has ended.");
}
