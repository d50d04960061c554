// The log of a worker, of the supervisor, or of the gateway: followed, searched, paused.
//
//   html`<${Log} names=${["supervisor", "gateway"]} label="Log of" picture=${picture} />`   with a choice, if there are several names
//
// Only administrators get logs. With auth: none nobody does, and the line that turns them on is shown in their place.

import { Button, Choice, count, html, Switched, useAnswer, useLayoutEffect, useRef, useState } from "./ui.js";
import { call } from "./session.js";

const FOLLOW_MS = 1000;
const MOST_LINES = 2000;
const NONE = { lines: [], unfinished: "", after: null };

export function Log({ names, label, picture }) {
  const [chosen, setChosen] = useState(names[0]);
  const name = names.includes(chosen) ? chosen : names[0]; // a worker may be gone
  if (picture.auth === "none") return html`<${Switched} what="Logs are" />`;
  return html`
    ${names.length > 1 && html`<div class="log-row">
      <${Choice} label=${label} value=${name} options=${names.map((each) => [each, each])} onChange=${setChosen} /></div>`}
    <${Lines} key=${name} name=${name} />`;
}

// One log. It is followed by its position, so each line comes once, also after a pause.
function Lines({ name }) {
  const [paused, setPaused] = useState(false);
  const [filter, setFilter] = useState("");
  const [box, atEnd] = [useRef(), useRef(true)];
  const read = async (known) => {
    const place = known.after === null ? "" : `&after=${known.after}`;
    const answer = await call("GET", `/v1/logs?model=${encodeURIComponent(name)}&lines=1000${place}`);
    const number = (known.lines.at(-1)?.number || 0) + 1;
    const begin = answer.restarted ? ["— the log begins anew here —"] : [];
    const fresh = [...begin, ...answer.lines].map((text, i) => ({ number: number + i, text }));
    const next = { lines: [...known.lines, ...fresh].slice(-MOST_LINES), unfinished: answer.unfinished, after: answer.position };
    return answer.more ? read(next) : next;
  };
  const [log = NONE, wrong] = useAnswer(async (known = NONE) => {
    const next = paused ? known : await read(known);
    return next.after === known.after && next.unfinished === known.unfinished ? known : next;
  }, FOLLOW_MS);
  const words = filter.trim().toLowerCase();
  const every = log.unfinished ? [...log.lines, { number: "unfinished", text: log.unfinished }] : log.lines;
  const shown = words ? every.filter((line) => line.text.toLowerCase().includes(words)) : every;
  useLayoutEffect(() => { if (atEnd.current) box.current.scrollTop = box.current.scrollHeight; }, [log, words]);
  const scrolled = () => { atEnd.current = box.current.scrollHeight - box.current.scrollTop - box.current.clientHeight < 30; };
  return html`<div class="row log-row">
      <label class="log-search">Search <input type="search" value=${filter} spellcheck="false" onInput=${(event) => setFilter(event.target.value)} /></label>
      <span class="small faint number">${words ? `${count(shown.length)} of ${count(every.length)} lines` : `${count(every.length)} ${every.length === 1 ? "line" : "lines"}`}</span>
      <${Button} label=${paused ? "Resume the log" : "Pause the log"} onClick=${() => setPaused(!paused)}>${paused ? "Resume" : "Pause"}<//>
    </div>
    ${wrong && html`<p class="error" role="alert">${wrong}</p>`}
    <pre class="log" tabindex="0" role="region" aria-label=${`Log of ${name}`} ref=${box} onScroll=${scrolled}>
      ${shown.map((line) => html`<span key=${line.number} class=${/\b(ERROR|CRITICAL)\b/.test(line.text) ? "error" : undefined}>${line.text + "\n"}</span>`)}
      ${shown.length === 0 && (words ? "no line has this text" : "no line yet")}</pre>`;
}
