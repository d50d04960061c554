// The live picture: all that /page/events tells, kept up to date.
//
//   const { picture, connection } = useLive()   in a component; it is drawn again when either changes
//   workers(picture)                            the workers, in the order of models.yaml
//   models(picture)                             [{ name, workers: [...] }], the same by model
//   speeds(worker)                              its tokens/s in each of the last SPEEDS seconds, the newest one last; [] for keys
//                                               without the right status
//
// picture has: auth ("keys" or "none"), key (a short name of the session's key, "" without one), admin (whether orders are
// allowed), trouble (why the supervisor does not answer), order, "model NAME" for each worker, requests (the oldest 100 unfinished
// ones), requests_total, and for keys with the right status also gpus, supervisor, events. It is {} before the first news.
// connection is { state, text }: waiting, live, lost or signed out.

import { drawing } from "./ui.js";
import { ask, serverSentEvents } from "./session.js";

const live = { picture: {}, connection: { state: "waiting", text: "connecting" } };
const [useDrawn, draw] = drawing();
let updates = null;
let second = 0; // the last one that has its value in the picture's speeds

export const SPEEDS = 120;
const EVENTS = 100;

const changed = (parts) => draw(Object.assign(live, parts));

export function useLive() {
  useDrawn();
  return live;
}

export function workers(picture) {
  return (picture.order || []).map((name) => picture[`model ${name}`]).filter(Boolean);
}

export function models(picture) {
  const all = workers(picture);
  return [...new Set(all.map((worker) => worker.model))].map((name) => ({ name, workers: all.filter((worker) => worker.model === name) }));
}

// A picture has the speeds until then, and changes have none. Browsers call the timers of a hidden tab rarely, so each call
// appends what the seconds since the last one had: the speed before the next change.
function moveOn() {
  const now = Math.floor(Date.now() / 1000);
  for (second = Math.max(second, now - SPEEDS); second < now; second++) {
    for (const { name, tokens_per_s } of workers(live.picture)) {
      if (tokens_per_s === undefined) continue;
      const line = (live.picture.speeds ||= {})[name] ||= [];
      line.push(tokens_per_s);
      if (line.length > SPEEDS) line.shift();
    }
  }
}

export function speeds(worker) {
  moveOn();
  return live.picture.speeds?.[worker.name] || [];
}

// A change has whole parts (null: it is gone), but of a worker the changed values, and of a session's events the new ones.
function merged(picture, change) {
  const found = { ...picture, ...change };
  for (const [part, value] of Object.entries(change)) {
    const old = picture[part];
    if (value === null) delete found[part];
    else if (part.startsWith("model ") && old) found[part] = { ...old, ...value };
    else if (part === "events" && old && !("session" in change)) found[part] = [...old, ...value].slice(-EVENTS);
  }
  return found;
}

export async function connect() {
  updates?.abort();
  const mine = updates = new AbortController();
  let lost = "no connection to the gateway";
  try {
    const response = await ask("/page/events", { signal: mine.signal });
    for await (const { name, data } of serverSentEvents(response.body)) {
      moveOn();
      changed({ picture: name === "picture" ? data : merged(live.picture, data), connection: { state: "live", text: "live" } });
    }
  } catch (error) {
    if (error.status === 401) {
      if (live.picture.order) location.reload(); // nothing of this session may be left
      else changed({ connection: { state: "signed out", text: "signed out" } });
      return;
    }
    if (error.status) lost = error.message;
  }
  if (mine.signal.aborted) return;
  changed({ connection: { state: "lost", text: lost } });
  setTimeout(() => mine === updates && connect(), 1000);
}
