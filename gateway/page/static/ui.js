// What all views are made of.
//
//   html`<${Button} onClick=${f}>Send<//>`   preact elements; hooks are exported, too
//   formatting: bytes, span, ago, count, speed, clock, inWords, joined; sum(all, figure)
//   components: Icon, Mark, State, Bar, Button, Copy, Choice, Facts, Time, Empty, Section,
//               Switched (a view that is off), Dialog, FormDialog; reading("The keys", answer, wrong) until there is an answer
//   order("Stop a", () => call(...))         does it, announces it to screen readers, and shows a failure at the top of the page
//   useNow(ms)                               draws again every ms, and returns Date.now(); only while the tab is visible
//   useAnswer(read, ms, key)                 what read() answers, kept up to date
//   useSubmit(act), drawing()                for forms, and for what is kept outside of components
//   address("models", "a/b:c")               "#/models/a%2Fb%3Ac"

import { html, render, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState, useCallback } from "./vendor/preact-htm.js";

export { html, render, useEffect, useLayoutEffect, useMemo, useReducer, useRef, useState, useCallback };

export const bytes = (n) => n === null || n === undefined ? "–" : `${(n / 2 ** 30).toFixed(n < 2 ** 30 ? 2 : 1)} GiB`;
export const count = (n) => n === null || n === undefined ? "–" : n.toLocaleString("en");
export const speed = (n) => n === null || n === undefined ? "–" : n < 100 ? n.toFixed(1) : count(Math.round(n));
export const joined = (parts) => parts.filter(Boolean).join(", ");
export const sum = (all, figure) => all.reduce((total, one) => total + (figure(one) || 0), 0);
export const inWords = (state) => state.replaceAll("_", " ");
export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString();

export function span(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export const address = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

// The value of read(the value before): now, every ms, and when the list key changes. Nothing is read while the tab is hidden,
// and never twice at once. Returns [the value (undefined at first), why it cannot be read ("" if it can), a function that
// reads it again]. What was read for an earlier key does not come later.
export function useAnswer(read, ms, key = []) {
  const [answer, setAnswer] = useState();
  const [wrong, setWrong] = useState("");
  const now = useRef({});
  now.current.read = read;
  useEffect(() => {
    let [last, waiting, gone] = [Promise.resolve(), 0, false];
    const again = now.current.again = () => {
      waiting += 1;
      return last = last.then(() => now.current.read(now.current.answer)).then((found) => {
        if (!gone) setAnswer(now.current.answer = found);
        return "";
      }).catch((error) => error.message).then((failed) => {
        waiting -= 1;
        if (!gone) setWrong(failed);
      });
    };
    const poll = () => document.hidden || waiting || again();
    poll();
    const timer = ms && setInterval(poll, ms);
    document.addEventListener("visibilitychange", poll);
    return () => {
      gone = true;
      clearInterval(timer);
      document.removeEventListener("visibilitychange", poll);
    };
  }, [ms, ...key]);
  return [answer, wrong, () => now.current.again()];
}

export const useNow = (ms = 1000) => useAnswer(() => Date.now(), ms)[0] ?? Date.now();

// For what is kept outside of components: [use, changed]. A component that calls use() is drawn again by changed().
export function drawing() {
  const all = new Set();
  const use = () => {
    const [, draw] = useReducer((n) => n + 1, 0);
    useLayoutEffect(() => { // at once: news may come before effects run
      all.add(draw);
      return () => all.delete(draw);
    }, []);
  };
  return [use, () => all.forEach((draw) => draw())];
}

// For a form: act(its elements) is called when it is submitted, and ``wrong`` is the message of the error that act throws.
export function useSubmit(act) {
  const [{ wrong, busy }, set] = useState({ wrong: "", busy: false });
  const submit = (event) => {
    event.preventDefault();
    if (busy) return;
    set({ wrong: "", busy: true });
    act(event.target.elements).then(() => "", (error) => error.message).then((wrong) => set({ wrong, busy: false }));
  };
  return { wrong, busy, submit };
}

const said = { notice: "", spoken: "" };
const [useSaid, drawSaid] = drawing();
const say = (parts) => drawSaid(Object.assign(said, parts));

export const notice = (text) => say({ notice: text });
export const announce = (text) => say({ spoken: text });

export async function order(what, f) {
  try {
    const answer = await f();
    say({ notice: "", spoken: `${what}: ordered` });
    return answer;
  } catch (error) {
    say({ notice: `${what}: ${error.message}`, spoken: "" });
    return null;
  }
}

export function Said({ trouble }) {
  useSaid();
  const text = trouble ? `The supervisor does not answer: ${trouble}` : said.notice;
  return html`
    <div role="alert">${text && html`
      <p class="notice"><${Icon} name="failed" /> <span>${text}</span>
        ${!trouble && html`<${Button} kind="plain" label="Close this notice" onClick=${() => notice("")}><${Icon} name="close" /><//>`}
      </p>`}
    </div>
    <p class="hidden" role="status">${said.spoken}</p>`;
}

// Paths in a square of 16, drawn as lines.
const ICONS = {
  overview: "M2 3h5v5H2zM9 3h5v3H9zM9 8h5v5H9zM2 10h5v3H2z",
  requests: "M2 4h12M2 8h12M2 12h8",
  chat: "M2 3h12v8H7l-3 3v-3H2z",
  connect: "M6 2v4M10 2v4M4 6h8v2a4 4 0 0 1-8 0zM8 12v2",
  keys: "M9.5 6.5a3 3 0 1 0-2 2L8 9h2v2h2v2h2v-2z",
  configuration: "M3 4h10M3 8h10M3 12h10M6 2.5v3M11 6.5v3M5 10.5v3",
  ready: "M3 8.5l3.5 3.5L13 4.5",
  busy: "M8 3a5 5 0 1 1-5 5",
  asleep: "M12.5 10A5.5 5.5 0 0 1 6 3.5a5.5 5.5 0 1 0 6.5 6.5z",
  off: "M5 8h6",
  failed: "M8 3v6M8 11.5v1",
  close: "M4 4l8 8M12 4l-8 8",
  copy: "M6 6h7v7H6zM3 10V3h7",
  search: "M11 11l3 3M7 12A5 5 0 1 0 7 2a5 5 0 0 0 0 10z",
  more: "M5 6l3 3 3-3",
};

export function Icon({ name }) {
  return html`<svg class="icon" viewBox="0 0 16 16" aria-hidden="true"><path d=${ICONS[name]} /></svg>`;
}

export const Mark = ({ kind, icon = kind, children }) =>
  html`<span class=${`state ${kind}`}><${Icon} name=${icon} />${children}</span>`;

// Every other state is one that passes.
const KINDS = { ready: "ready", failed: "failed", asleep: "asleep", stopped: "off", unloaded: "off" };

export function State({ worker }) {
  const kind = KINDS[worker.state] || "busy";
  const progress = worker.progress?.total ? ` ${Math.floor(100 * worker.progress.done / worker.progress.total)} %` : "";
  return html`<${Mark} kind=${kind}>${inWords(worker.state)}${progress}<//>`;
}

// A bar with what is held, what was estimated, and a mark at a limit. All are shares of the whole, from 0 to 1.
export function Bar({ held, estimated, limit }) {
  const width = (share) => `${Math.min(100, Math.max(0, 100 * (share || 0))).toFixed(1)}%`;
  return html`<div class="bar" aria-hidden="true">
    <i style=${{ width: width(estimated) }} /><i class="held" style=${{ width: width(held) }} />
    ${limit !== null && limit !== undefined && html`<i class="limit" style=${{ left: width(limit) }} />`}
  </div>`;
}

// kind: "" (the main one), "quiet", "danger" or "plain" (an icon alone). label: its name for screen readers, if longer than its text.
export function Button({ kind = "quiet", label, type = "button", children, ...rest }) {
  return html`<button type=${type} class=${kind} aria-label=${label} ...${rest}>${children}</button>`;
}

export function Copy({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch { // over plain HTTP from another machine browsers offer no clipboard
      const area = document.body.appendChild(Object.assign(document.createElement("textarea"), { value: text }));
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    setDone(true);
    announce("copied");
    setTimeout(() => setDone(false), 2000);
  };
  return html`<${Button} label=${label} onClick=${copy}><${Icon} name=${done ? "ready" : "copy"} /> ${done ? "Copied" : "Copy"}<//>`;
}

export const Empty = ({ children }) => html`<p class="none">${children}</p>`;

// What stands in the place of an answer, or above an old one.
// This is no component: preact misplaces what follows a component that draws nothing any longer.
export const reading = (what, answer, wrong) => wrong
  ? html`<p class="error" role="alert">${what} cannot be read: ${wrong}</p>` : !answer && html`<${Empty}>Reading …<//>`;

// tools: what stands beside the title. at: a ref of the title, which can have the focus then.
export function Section({ title, id = `${title.toLowerCase()}-title`, tools, at, children }) {
  const heading = html`<h3 id=${id} ref=${at} tabindex=${at && -1}>${title}</h3>`;
  return html`<section aria-labelledby=${id}>
    ${tools ? html`<div class="row head">${heading}${tools}</div>` : heading}${children}</section>`;
}

// options: [[value, text], ...]
export const Choice = ({ label, value, options, onChange, ...rest }) => html`<label>${label}${" "}
  <select aria-label=${label} value=${value} onChange=${(event) => onChange(event.target.value)} ...${rest}>
    ${options.map(([name, text]) => html`<option key=${name} value=${name}>${text}</option>`)}</select></label>`;

// facts: [[name, value], ...]. Those without a value are left out.
export const Facts = ({ facts, kind = "" }) => html`<dl class=${`facts ${kind}`}>
  ${facts.filter(([, value]) => value).map(([name, value]) => html`<dt key=${name}>${name}</dt><dd key=${`${name}=`}>${value}</dd>`)}</dl>`;

// A time in milliseconds. Its title is the whole of it.
export const Time = ({ at, children }) =>
  html`<time datetime=${new Date(at).toISOString()} title=${new Date(at).toLocaleString()}>${children}</time>`;
export const ago = (at, now = Date.now()) => `${span(Math.max(0, now - at) / 1000)} ago`;

// What a view shows that is off with auth: none.
export function Switched({ what }) {
  return html`<div class="card"><p>${what} off while everybody on this machine may use the page without a token. This line of models.yaml
    turns them on, after <code>modelctl keys new NAME --http --rights infer,status,admin</code> has made a token for you:</p>
    <pre>gateway: {auth: keys}</pre>
    <p>A section <code>gateway</code> that is there already gets <code>auth: keys</code> in it. <code>modelctl reload</code> applies the
    change.</p></div>`;
}

// A dialog over the page while it is drawn. Escape closes it. The first control has the focus, and it goes back afterwards.
export function Dialog({ title, onClose, children }) {
  const element = useRef();
  useEffect(() => {
    const [dialog, before] = [element.current, document.activeElement];
    dialog.showModal();
    return () => {
      dialog.remove(); // while it is there, nothing behind it takes the focus
      if (before?.isConnected) before.focus();
    };
  }, []);
  return html`<dialog ref=${element} aria-labelledby="dialog-title" onClose=${onClose}
    onCancel=${(event) => { event.preventDefault(); onClose(); }}>
    <h2 id="dialog-title">${title}</h2>${children}</dialog>`;
}

// A dialog that asks before act(the form's elements). label: of the button. kind: with "danger", Cancel comes first and has the focus.
export function FormDialog({ title, label, kind = "", act, onClose, children }) {
  const { wrong, busy, submit } = useSubmit(act);
  const buttons = [html`<${Button} kind=${kind} type="submit" aria-disabled=${busy}>${label}<//>`,
    html`<${Button} onClick=${onClose}>Cancel<//>`];
  return html`<${Dialog} title=${title} onClose=${onClose}><form onSubmit=${submit}>${children}
    <p class="error" role="alert">${wrong}</p>
    <div class="row">${kind ? buttons.reverse() : buttons}</div></form><//>`;
}
