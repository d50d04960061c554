// The view Keys and usage. Administrators make, change and revoke keys. Below, the tokens of each day: of the own key, or of all keys.
import {
  announce, Button, Copy, count, Dialog, Empty, html, Icon, span, Switched, useEffect, useEvery, useMemo, useRef, useState,
} from "../ui.js";
import { call } from "../session.js";

const EVERY_MS = 10_000;
const MOST_KEYS = [100, 1000]; // at first, and when somebody asks for more
const RIGHTS = { infer: "Send requests", status: "See the status of everything", admin: "Give orders and manage keys", gateway: "Ask for other keys" };
// The fields of a key: its name in /v1/keys, its label, the input, and what an empty one means.
const LIMITS = [
  ["models", "Models", { placeholder: "all" }, "Names, or patterns such as qwen*, with commas"],
  ["expires", "Expires", { placeholder: "never", list: "lifetimes" }, "After 12h, 30d or 8w, or at a time"],
  ["max_in_flight", "Requests at once", { type: "number", min: 1, placeholder: "no limit" }],
  ["requests_per_minute", "Requests per minute", { type: "number", min: 1, placeholder: "no limit" }],
  ["tokens_per_minute", "Tokens per minute", { type: "number", min: 1, placeholder: "no limit" }],
  ["tokens_per_day", "Tokens per day", { type: "number", min: 1, placeholder: "no limit" }],
  ["keep_alive_s", "Longest keep_alive", { placeholder: "none" }, "Seconds, or 2h"],
];
const SHORT = {
  max_in_flight: "at once", requests_per_minute: "requests/min", tokens_per_minute: "tokens/min", tokens_per_day: "tokens/day",
  keep_alive_s: "s keep_alive",
};

const pathOf = (key) => `/v1/keys/${encodeURIComponent(key.name)}`;
const day = (time) => time.slice(0, 10);
const ago = (time) => `${span(Math.max(0, Date.now() - Date.parse(time)) / 1000)} ago`;

// --- keys -------------------------------------------------------------------------------------------------------------

// The text of a field for a key, and the value of /v1/keys for a text.
const textOf = (key, field) => key?.[field] === null || key?.[field] === undefined ? "" : String(key[field]);
function valueOf(field, text) {
  if (!text.trim()) return null;
  if (field === "models") return text.split(",").map((part) => part.trim());
  return /^\d+$/.test(text.trim()) && field !== "expires" ? Number(text) : text.trim();
}

function KeyForm({ before, onDone, onClose }) {
  const [wrong, setWrong] = useState("");
  const [busy, setBusy] = useState(false);
  const title = before ? `Change ${before.name}` : "New key";
  const submit = async (event) => {
    event.preventDefault();
    const form = event.target;
    const rights = Object.keys(RIGHTS).filter((right) => form.elements[right]?.checked);
    const body = before ? {} : { name: form.elements.name.value.trim() };
    if (rights.join() !== (before?.rights || []).join()) body.rights = rights;
    for (const [field] of LIMITS) {
      const text = form.elements[field].value;
      if (text !== textOf(before, field)) body[field] = valueOf(field, text);
    }
    if (before && !Object.keys(body).length) return onClose();
    setBusy(true);
    setWrong("");
    try {
      onDone(await (before ? call("PATCH", pathOf(before), body) : call("POST", "/v1/keys", body)));
    } catch (error) {
      setWrong(error.message);
      setBusy(false);
    }
  };
  return html`<${Dialog} title=${title} onClose=${onClose}><form class="key-form" onSubmit=${submit}>
    ${!before && html`<label>Name <input name="name" required pattern="[a-z0-9][a-z0-9._\\-]{0,63}" autocomplete="off" spellcheck=${false}
      title="a to z, 0 to 9, '.', '_' and '-', at most 64, starting with a letter or digit" /></label>`}
    <fieldset><legend>Rights</legend>${Object.entries(RIGHTS).map(([right, words]) => (right !== "gateway" || before?.http === false) && html`
      <label key=${right}><input type="checkbox" name=${right} defaultChecked=${(before?.rights || ["infer"]).includes(right)} />
        <span><code>${right}</code> ${words}</span></label>`)}</fieldset>
    <div class="limits">${LIMITS.map(([field, label, input, hint]) => html`<div key=${field}>
      <label for=${`key-${field}`}>${label}</label>
      <input id=${`key-${field}`} name=${field} defaultValue=${textOf(before, field)} autocomplete="off" spellcheck=${false} ...${input}
        aria-describedby=${hint && `hint-${field}`} />
      ${hint && html`<span id=${`hint-${field}`} class="small faint">${hint}</span>`}</div>`)}</div>
    <datalist id="lifetimes">${["1d", "7d", "30d", "90d", "52w"].map((value) => html`<option value=${value} />`)}</datalist>
    <p class="error" role="alert">${wrong}</p>
    <div class="row"><${Button} kind="" type="submit" disabled=${busy}>${before ? "Save" : "Make key"}<//>
      <${Button} onClick=${onClose}>Cancel<//></div>
  </form><//>`;
}

const Notes = ({ notes }) => notes.map((note) => html`<p class="small" key=${note}>${note}</p>`);

// The token of a new key. It is only here, and gone when the dialog is closed.
function Made({ made, onClose }) {
  const curl = `curl ${location.origin}/v1/models -H "Authorization: Bearer ${made.token}"`;
  const button = useRef();
  useEffect(() => button.current.querySelector("button").focus(), []);
  return html`<${Dialog} title=${`The token of ${made.key?.name}`} onClose=${onClose}>
    <p>Copy it now. It is kept nowhere, and is not shown again.</p>
    <div class="row" ref=${button}><code class="token">${made.token}</code><${Copy} text=${made.token} label="Copy the token" /></div>
    <p>A line to try it:</p>
    <div class="row"><code class="token">${curl}</code><${Copy} text=${curl} label="Copy the line" /></div>
    <${Notes} notes=${made.notes} />
    <div class="row"><${Button} kind="" onClick=${onClose}>Done<//></div><//>`;
}

function Revoke({ keyOf, onDone, onClose }) {
  const [wrong, setWrong] = useState("");
  const revoke = () => call("DELETE", pathOf(keyOf)).then(onDone, (error) => setWrong(error.message));
  return html`<${Dialog} title=${`Revoke ${keyOf.name}?`} onClose=${onClose}>
    <p>Its requests end, and programs with this key are refused from now on. A revoked key cannot be brought back.</p>
    <p class="error" role="alert">${wrong}</p>
    <div class="row"><${Button} onClick=${onClose}>Cancel<//><${Button} kind="danger" onClick=${revoke}>Revoke ${keyOf.name}<//></div><//>`;
}

function limitsOf(key) {
  return Object.entries(SHORT).filter(([field]) => key[field] !== null).map(([field, unit]) => `${count(key[field])} ${key[field] === 1 ? unit.replace("s/", "/") : unit}`).join(", ");
}

function KeyRow({ one, onChange, onRevoke }) {
  const ended = one.expires && Date.parse(one.expires) <= Date.now();
  return html`<tr data-key=${one.name}>
    <th scope="row">${one.name}${one.own && html` <span class="small faint">(yours)</span>`}${!one.http && html` <span class="small faint">over TCP</span>`}</th>
    <td data-name="Rights">${one.rights.join(", ")}</td>
    <td data-name="Models" class="break">${one.models ? one.models.join(", ") : "all"}</td>
    <td data-name="Limits" class="break">${limitsOf(one) || "none"}</td>
    <td data-name="Made"><time datetime=${one.created}>${day(one.created)}</time></td>
    <td data-name="Expires">${!one.expires ? "never" : ended ? html`<span class="state failed"><${Icon} name="failed" />expired</span>`
      : html`<time datetime=${one.expires}>${day(one.expires)}</time>`}</td>
    <td data-name="Last used">${one.last_used ? html`<time datetime=${one.last_used} title=${new Date(one.last_used).toLocaleString()}>${ago(one.last_used)}</time>`
      : "–"}</td>
    <td><div class="row orders"><${Button} label=${`Change ${one.name}`} onClick=${() => onChange(one)}>Change<//>
      <${Button} kind="danger" label=${`Revoke ${one.name}`} disabled=${one.own} onClick=${() => onRevoke(one)}>Revoke<//></div></td>
  </tr>`;
}

function KeyTable() {
  const [listed, setListed] = useState(null);
  const [trouble, setTrouble] = useState("");
  const [dialog, setDialog] = useState({});
  const [limit, setLimit] = useState(MOST_KEYS[0]);
  const title = useRef();
  const read = () => call("GET", `/v1/keys?limit=${limit}`).then((answer) => (setListed(answer), setTrouble("")),
    (error) => setTrouble(error.message));
  useEvery(EVERY_MS, read);
  useEffect(() => {
    if (listed) read();
  }, [limit]);
  const close = () => setDialog({});
  const changed = (answer) => {
    setDialog(answer.token ? { made: answer } : answer.notes?.length ? { noted: answer } : {});
    announce("saved");
    read();
  };
  const revoked = async () => {
    close();
    announce(`${dialog.revoke.name} is revoked`);
    await read();
    title.current?.focus();
  };
  const keys = listed?.keys || [];
  return html`<section aria-labelledby="keys-title">
    <div class="row head"><h3 id="keys-title" tabindex="-1" ref=${title}>Keys</h3>
      <${Button} onClick=${read} label="Refresh the keys">Refresh<//>
      <${Button} kind="" onClick=${() => setDialog({ form: true })}>New key<//></div>
    ${!listed && !trouble && html`<${Empty}>Reading …<//>`}
    ${trouble && html`<p class="error">The keys cannot be read: ${trouble}</p>`}
    ${keys.length > 0 && html`<div class="scroll"><table class="keys" aria-labelledby="keys-title">
      <thead><tr><th>Name</th><th>Rights</th><th>Models</th><th>Limits</th><th>Made</th><th>Expires</th><th>Last used</th><th><span class="hidden">Orders</span></th></tr></thead>
      <tbody>${keys.map((one) => html`<${KeyRow} key=${one.name} one=${one} onChange=${() => setDialog({ form: true, before: one })}
        onRevoke=${() => setDialog({ revoke: one })} />`)}</tbody></table></div>`}
    ${listed?.more && (limit < MOST_KEYS[1] ? html`<${Button} onClick=${() => setLimit(MOST_KEYS[1])}>Show more keys<//>`
      : html`<p class="small faint">There are further keys: <code>modelctl keys list</code> shows all.</p>`)}
    ${dialog.form && html`<${KeyForm} before=${dialog.before} onDone=${changed} onClose=${close} />`}
    ${dialog.made && html`<${Made} made=${dialog.made} onClose=${close} />`}
    ${dialog.noted && html`<${Dialog} title="Saved" onClose=${close}><${Notes} notes=${dialog.noted.notes} />
      <div class="row"><${Button} kind="" onClick=${close}>Done<//></div><//>`}
    ${dialog.revoke && html`<${Revoke} keyOf=${dialog.revoke} onDone=${revoked} onClose=${close} />`}
  </section>`;
}

// --- usage ------------------------------------------------------------------------------------------------------------

const RANGES = [["1", "Today"], ["7", "Last 7 days"], ["30", "Last 30 days"], ["", "All"]];
const COUNTS = [["requests", "Requests"], ["prompt_tokens", "Tokens in"], ["cached_tokens", "From cache"], ["completion_tokens", "Tokens out"]];
const KINDS = "kind"; // one colour for each kind of token, in place of each model or key
const SHOWN = [["", "Tokens in and out"], ...COUNTS];
const MOST_SERIES = 6;
const MOST_ROWS = 25;
const DAY_MS = 86_400_000;
const isoDay = (ms) => new Date(ms).toISOString().slice(0, 10);
const firstDay = (days) => isoDay(Date.now() - (days - 1) * DAY_MS);
const amount = (row, what) => what ? row[what] : row.prompt_tokens + row.completion_tokens;

// The series of the chart: {name, values by day}, the largest first. Further ones are put together.
function seriesOf(rows, days, by, what) {
  const at = new Map(days.map((one, index) => [one, index]));
  const found = new Map();
  const add = (name, row, value) => {
    if (!found.has(name)) found.set(name, { name, values: days.map(() => 0), sum: 0 });
    const series = found.get(name);
    series.values[at.get(row.day)] += value;
    series.sum += value;
  };
  for (const row of rows) {
    if (!at.has(row.day)) continue;
    if (by !== KINDS) add(row[by] || "no key", row, amount(row, what));
    else {
      add("In", row, row.prompt_tokens - row.cached_tokens);
      add("In, from cache", row, row.cached_tokens);
      add("Out", row, row.completion_tokens);
    }
  }
  const all = [...found.values()];
  if (by !== KINDS) all.sort((a, b) => b.sum - a.sum || (a.name < b.name ? -1 : 1));
  if (all.length <= MOST_SERIES) return all;
  const rest = all.slice(MOST_SERIES - 1);
  return [...all.slice(0, MOST_SERIES - 1), {
    name: `${rest.length} others`, sum: rest.reduce((sum, one) => sum + one.sum, 0),
    values: days.map((_, index) => rest.reduce((sum, one) => sum + one.values[index], 0)),
  }];
}

// Bars of days on one another. uPlot draws on a canvas, so the colours are read from the style sheet.
function Chart({ days, series, onDay }) {
  const element = useRef();
  const newest = useRef();
  newest.current = onDay;
  useEffect(() => {
    let plot = null;
    let gone = false;
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const draw = async () => {
      const { default: uPlot } = await import("../vendor/uplot.js");
      if (gone) return;
      plot?.destroy();
      const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
      // The last series is on top: it is drawn first, as high as all together.
      const heaps = series.map((_, index) => days.map((_, at) => series.slice(0, index + 1).reduce((sum, one) => sum + one.values[at], 0)));
      const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
      plot = new uPlot({
        width: element.current.clientWidth, height: 220, legend: { show: false },
        scales: { x: { time: false, range: [-0.5, days.length - 0.5] }, y: { range: (_, least, most) => [0, most * 1.05 || 1] } },
        axes: [
          { ...axis, size: 30, grid: { show: false }, incrs: [1, 2, 5, 10, 30, 90, 365], space: 60,
            values: (_, splits) => splits.map((at) => days[at] && new Date(days[at]).toLocaleDateString([], { month: "short", day: "numeric", timeZone: "UTC" })) },
          { ...axis, size: 64, values: (_, splits) => splits.map((value) => Number.isInteger(value) ? short(value) : "") },
        ],
        cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
        hooks: { setCursor: [(u) => newest.current(u.cursor.idx ?? null)] },
        series: [{}, ...series.map((_, index) => ({
          fill: colour(`--series-${series.length - 1 - index}`), width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.75, 48] }),
        }))],
      }, [days.map((_, at) => at), ...heaps.reverse()], element.current);
    };
    draw();
    const resized = new ResizeObserver(() => plot?.setSize({ width: element.current.clientWidth, height: 220 }));
    resized.observe(element.current);
    dark.addEventListener("change", draw);
    return () => {
      gone = true;
      resized.disconnect();
      dark.removeEventListener("change", draw);
      plot?.destroy();
      newest.current(null);
    };
  }, [days, series]);
  return html`<div class="chart" ref=${element} aria-hidden="true" />`;
}

const short = (n) => n >= 1e9 ? `${n / 1e9}G` : n >= 1e6 ? `${n / 1e6}M` : n >= 1e3 ? `${n / 1e3}k` : String(n);

function useUsage(range) {
  const [usage, setUsage] = useState(null);
  const [trouble, setTrouble] = useState("");
  const wanted = useRef();
  const read = async () => {
    wanted.current = range;
    try {
      const answer = await call("GET", `/v1/usage${range ? `?since=${firstDay(Number(range))}` : ""}`);
      if (wanted.current !== range) return; // the answer for another range is on its way
      setUsage((before) => JSON.stringify({ ...answer, range }) === JSON.stringify(before) ? before : { ...answer, range });
      setTrouble("");
    } catch (error) {
      setTrouble(error.message);
    }
  };
  useEvery(EVERY_MS, read);
  useEffect(() => {
    if (usage) read();
  }, [range]);
  return [usage, trouble, read];
}

function daysOf({ rows, range }) {
  const first = range ? firstDay(Number(range)) : rows.length ? rows.at(-1).day : isoDay(Date.now());
  const days = [];
  for (let at = Date.parse(first); at <= Date.now(); at += DAY_MS) days.push(isoDay(at));
  return days;
}

function UsageTable({ usage, all, onAll }) {
  const rows = all ? usage.rows : usage.rows.slice(0, MOST_ROWS);
  return html`<div class="scroll"><table class="usage" aria-labelledby="usage-title">
    <thead><tr><th>Day (UTC)</th><th>Key</th><th>Model</th>${COUNTS.map(([, title]) => html`<th class="number">${title}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${`${row.day} ${row.key} ${row.model}`}>
      <td>${row.day}</td><td>${row.key || "no key"}</td><td class="break">${row.model}</td>
      ${COUNTS.map(([name, title]) => html`<td class="number" data-name=${title}>${count(row[name])}</td>`)}</tr>`)}</tbody>
    <tfoot><tr><td colspan="3">Total</td>${COUNTS.map(([name, title]) => html`<td class="number" data-name=${title}>${count(usage.total[name])}</td>`)}</tr></tfoot>
  </table></div>
  ${rows.length < usage.rows.length && html`<${Button} onClick=${onAll}>Show all ${count(usage.rows.length)} rows<//>`}`;
}

function Usage({ ofAll }) {
  const [range, setRange] = useState("7");
  const [by, setBy] = useState("model");
  const [what, setWhat] = useState("");
  const [all, setAll] = useState(false);
  const [over, setOver] = useState(null);
  const [usage, trouble, read] = useUsage(range);
  const days = useMemo(() => usage && daysOf(usage), [usage]);
  const series = useMemo(() => usage && seriesOf(usage.rows, days, by, what), [usage, by, what]);
  const choice = (label, value, options, set) => html`<label>${label}
    <select value=${value} onChange=${(event) => set(event.target.value)}>${options.map(([name, text]) => html`<option key=${name} value=${name}>${text}</option>`)}</select></label>`;
  const at = over !== null && days?.[over] ? over : null;
  return html`<section aria-labelledby="usage-title">
    <h3 id="usage-title">Usage</h3>
    <div class="fields">
      ${choice("Days", range, RANGES, setRange)}
      ${choice("By", by, [["model", "Model"], ...(ofAll ? [["key", "Key"]] : []), [KINDS, "In, from cache, out"]], setBy)}
      ${by !== KINDS && choice("Show", what, SHOWN, setWhat)}
      <${Button} onClick=${read} label="Refresh the usage">Refresh<//>
    </div>
    ${!usage && !trouble && html`<${Empty}>Reading …<//>`}
    ${trouble && html`<p class="error">The usage cannot be read: ${trouble}</p>`}
    ${usage && (usage.rows.length ? html`
      <div class="card"><${Chart} days=${days} series=${series} onDay=${setOver} />
        <ul class="legend" aria-label=${at === null ? "Sums" : days[at]}>
          <li class="faint">${at === null ? RANGES.find(([days]) => days === usage.range)[1] : days[at]}</li>
          ${series.map((one, index) => html`<li key=${one.name}><i class=${`series-${index}`} aria-hidden="true" />${one.name}
            <b class="number">${count(at === null ? one.sum : one.values[at])}</b></li>`)}</ul></div>
      ${usage.more && html`<p class="small">There are more rows than one answer holds, and the latest are shown. The total is that of all.</p>`}
      <${UsageTable} usage=${usage} all=${all} onAll=${() => setAll(true)} />`
      : html`<${Empty}>Nothing was counted on these days.<//>`)}
  </section>`;
}

export function Keys({ picture }) {
  return html`<h2 tabindex="-1">${picture.admin ? "Keys and usage" : "Usage"}</h2>
    ${picture.admin && (picture.auth === "none" ? html`<section aria-labelledby="keys-title"><h3 id="keys-title">Keys</h3><${Switched} what="Keys are" /></section>`
      : html`<${KeyTable} />`)}
    <${Usage} ofAll=${Boolean(picture.supervisor)} />`;
}
