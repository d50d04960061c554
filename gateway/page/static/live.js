// The live picture: all that /page/events tells, kept up to date.
//
//   const { picture, connection } = useLive()   in a component; it is drawn again when either changes
//   workers(picture)                            the workers, in the order of models.yaml
//   models(picture)                             [{ name, workers: [...] }], the same by model
//
// picture has: auth ("keys" or "none"), key (a short name of the session's key, "" without one), admin (whether orders are
// allowed), trouble (why the supervisor does not answer), order, "model NAME" for each worker, requests, and for keys with the
// right status also gpus, supervisor, events. It is {} before the first news. connection is { state, text }: waiting, live, lost or
// signed out.

import { useLayoutEffect, useReducer } from "./ui.js";
import { ask, serverSentEvents } from "./session.js";

const live = { picture: {}, connection: { state: "waiting", text: "connecting" } };
const drawn = new Set();
let updates = null;

function changed(parts) {
  Object.assign(live, parts);
  for (const draw of drawn) draw();
}

export function useLive() {
  const [, draw] = useReducer((count) => count + 1, 0);
  useLayoutEffect(() => { // at once: news may come before effects run
    drawn.add(draw);
    return () => drawn.delete(draw);
  }, []);
  return live;
}

export function workers(picture) {
  return (picture.order || []).map((name) => picture[`model ${name}`]).filter(Boolean);
}

export function models(picture) {
  const found = new Map();
  for (const worker of workers(picture)) {
    if (!found.has(worker.model)) found.set(worker.model, { name: worker.model, workers: [] });
    found.get(worker.model).workers.push(worker);
  }
  return [...found.values()];
}

export async function connect() {
  updates?.abort();
  const mine = updates = new AbortController();
  let lost = "no connection to the gateway";
  try {
    const response = await ask("/page/events", { signal: mine.signal });
    for await (const { name, data } of serverSentEvents(response.body)) {
      const picture = name === "picture" ? data : { ...live.picture, ...data };
      for (const [part, value] of Object.entries(picture)) if (value === null) delete picture[part];
      changed({ picture, connection: { state: "live", text: "live" } });
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
