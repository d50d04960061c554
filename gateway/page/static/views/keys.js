// The view Keys and usage. Administrators make, change and revoke keys. Below, the tokens of each day: of the own key, or of all keys.
import {
  ago, announce, Button, Choice, Copy, count, Dialog, Empty, FormDialog, html, Mark, reading, Section, sum, Switched, Time, useAnswer,
  useEffect, useMemo, useRef, useState,
} from "../ui.js";
import { call } from "../session.js";

const EVERY_MS = 10_000;
const MOST_KEYS = [100, 1000]; // at first, and when somebody asks for more
const RIGHTS = { infer: "Send requests", status: "See the status of everything", admin: "Give orders and manage keys", gateway: "Ask for other keys" };
// The fields of a key: its name in /v1/keys, its label, the input, what an empty one means, and a limit's unit in the table.
const NUMBER = { type: "number", min: 1, placeholder: "no limit" };
const FIELDS = [
  ["models", "Models", { placeholder: "all" }, "Names, or patterns such as qwen*, with commas"],
  ["expires", "Expires", { placeholder: "never", list: "lifetimes" }, "After 12h, 30d or 8w, or at a time"],
  ["max_in_flight", "Requests at once", NUMBER, "", "at once"],
  ["requests_per_minute", "Requests per minute", NUMBER, "", "requests/min"],
  ["tokens_per_minute", "Tokens per minute", NUMBER, "", "tokens/min"],
  ["tokens_per_day", "Tokens per day", NUMBER, "", "tokens/day"],
  ["keep_alive_s", "Longest keep_alive", { placeholder: "none" }, "Seconds, or 2h", "s keep_alive"],
];

const pathOf = (key) => `/v1/keys/${encodeURIComponent(key.name)}`;
const day = (time) => html`<time datetime=${time}>${time.slice(0, 10)}</time>`;

// The text of a field for a key, and the value of /v1/keys for a text.
const textOf = (key, field) => key?.[field] === null || key?.[field] === undefined ? "" : String(key[field]);
function valueOf(field, text) {
  if (!text.trim()) return null;
  if (field === "models") return text.split(",").map((part) => part.trim());
  return /^\d+$/.test(text.trim()) && field !== "expires" ? Number(text) : text.trim();
}

function KeyForm({ before, onDone, onClose }) {
  const save = async (elements) => {
    const rights = Object.keys(RIGHTS).filter((right) => elements[right]?.checked);
    const body = before ? {} : { name: elements.name.value.trim() };
    if (rights.join() !== (before?.rights || []).join()) body.rights = rights;
    for (const [field] of FIELDS) {
      const text = elements[field].value;
      if (text !== textOf(before, field)) body[field] = valueOf(field, text);
    }
    if (before && !Object.keys(body).length) return onClose();
    return onDone(await (before ? call("PATCH", pathOf(before), body) : call("POST", "/v1/keys", body)));
  };
  return html`<${FormDialog} title=${before ? `Change ${before.name}` : "New key"} label=${before ? "Save" : "Make key"} act=${save} onClose=${onClose}>
    ${!before && html`<label>Name <input name="name" required pattern="[a-z0-9][a-z0-9._\\-]{0,63}" autocomplete="off" spellcheck=${false}
      title="a to z, 0 to 9, '.', '_' and '-', at most 64, starting with a letter or digit" /></label>`}
    <fieldset><legend>Rights</legend>${Object.entries(RIGHTS).map(([right, words]) => (right !== "gateway" || before?.http === false) && html`
      <label key=${right}><input type="checkbox" name=${right} defaultChecked=${(before?.rights || ["infer"]).includes(right)} />
        <span><code>${right}</code> ${words}</span></label>`)}</fieldset>
    <div class="limits">${FIELDS.map(([field, label, input, hint]) => html`<div key=${field}>
      <label for=${`key-${field}`}>${label}</label>
      <input id=${`key-${field}`} name=${field} defaultValue=${textOf(before, field)} autocomplete="off" spellcheck=${false} ...${input}
        aria-describedby=${hint ? `hint-${field}` : undefined} />
      ${hint && html`<span id=${`hint-${field}`} class="small faint">${hint}</span>`}</div>`)}</div>
    <datalist id="lifetimes">${["1d", "7d", "30d", "90d", "52w"].map((value) => html`<option value=${value} />`)}</datalist><//>`;
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

function KeyRow({ one, onChange, onRevoke }) {
  const ended = one.expires && Date.parse(one.expires) <= Date.now();
  const unitOf = (unit, n) => n === 1 ? unit.replace("s/", "/") : unit;
  const limits = FIELDS.filter(([field, , , , unit]) => unit && one[field] !== null)
    .map(([field, , , , unit]) => `${count(one[field])} ${unitOf(unit, one[field])}`);
  const notes = [one.own && "(yours)", !one.http && "over TCP"].filter(Boolean);
  return html`<tr data-key=${one.name}>
    <th scope="row">${one.name}${notes.map((note) => html` <span class="small faint">${note}</span>`)}</th>
    <td data-name="Rights">${one.rights.join(", ")}</td>
    <td data-name="Models" class="break">${one.models ? one.models.join(", ") : "all"}</td>
    <td data-name="Limits" class="break">${limits.join(", ") || "none"}</td>
    <td data-name="Made">${day(one.created)}</td>
    <td data-name="Expires">${ended ? html`<${Mark} kind="failed">expired<//>` : one.expires ? day(one.expires) : "never"}</td>
    <td data-name="Last used">${one.last_used ? html`<${Time} at=${Date.parse(one.last_used)}>${ago(Date.parse(one.last_used))}<//>` : "–"}</td>
    <td><div class="row orders"><${Button} label=${`Change ${one.name}`} onClick=${() => onChange(one)}>Change<//>
      <${Button} kind="danger" label=${`Revoke ${one.name}`} disabled=${one.own} onClick=${() => onRevoke(one)}>Revoke<//></div></td>
  </tr>`;
}

function KeyTable() {
  const [dialog, setDialog] = useState(null);
  const [limit, setLimit] = useState(MOST_KEYS[0]);
  const title = useRef();
  const [listed, wrong, read] = useAnswer(() => call("GET", `/v1/keys?limit=${limit}`), EVERY_MS, [limit]);
  const close = () => setDialog(null);
  const changed = (answer) => {
    setDialog(answer.token ? html`<${Made} made=${answer} onClose=${close} />` : answer.notes?.length ? html`
      <${Dialog} title="Saved" onClose=${close}><${Notes} notes=${answer.notes} />
        <div class="row"><${Button} kind="" onClick=${close}>Done<//></div><//>` : null);
    announce("saved");
    read();
  };
  const change = (before) => setDialog(html`<${KeyForm} before=${before} onDone=${changed} onClose=${close} />`);
  const revoke = (one) => setDialog(html`<${FormDialog} title=${`Revoke ${one.name}?`} label=${`Revoke ${one.name}`} kind="danger" onClose=${close}
    act=${async () => {
      await call("DELETE", pathOf(one));
      close();
      announce(`${one.name} is revoked`);
      await read();
      title.current?.focus();
    }}><p>Its requests end, and programs with this key are refused from now on. A revoked key cannot be brought back.</p><//>`);
  return html`<${Section} title="Keys" at=${title} tools=${html`
      <${Button} onClick=${read} label="Refresh the keys">Refresh<//>
      <${Button} kind="" onClick=${() => change(null)}>New key<//>`}>
    ${reading("The keys", listed, wrong)}
    ${listed?.keys.length > 0 && html`<div class="scroll"><table class="keys folds" aria-labelledby="keys-title">
      <thead><tr>${["Name", "Rights", "Models", "Limits", "Made", "Expires", "Last used"].map((name) => html`<th>${name}</th>`)}
        <th><span class="hidden">Orders</span></th></tr></thead>
      <tbody>${listed.keys.map((one) => html`<${KeyRow} key=${one.name} one=${one} onChange=${change} onRevoke=${revoke} />`)}</tbody></table></div>`}
    ${listed?.more && (limit < MOST_KEYS[1] ? html`<${Button} onClick=${() => setLimit(MOST_KEYS[1])}>Show more keys<//>`
      : html`<p class="small faint">There are further keys: <code>modelctl keys list</code> shows all.</p>`)}
    ${dialog}<//>`;
}

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

const kindParts = (row) => [
  ["In", row.prompt_tokens - row.cached_tokens], ["In, from cache", row.cached_tokens], ["Out", row.completion_tokens],
];

// The series of the chart: {name, values by day, sum}, the largest first. Further ones are put together.
function seriesOf(rows, days, by, what) {
  const at = new Map(days.map((one, index) => [one, index]));
  const found = new Map();
  const parts = by === KINDS ? kindParts : (row) => [[row[by] || "no key", amount(row, what)]];
  for (const row of rows.filter((row) => at.has(row.day))) {
    for (const [name, value] of parts(row)) {
      if (!found.has(name)) found.set(name, { name, values: days.map(() => 0), sum: 0 });
      found.get(name).values[at.get(row.day)] += value;
      found.get(name).sum += value;
    }
  }
  const all = [...found.values()];
  if (by !== KINDS) all.sort((a, b) => b.sum - a.sum || (a.name < b.name ? -1 : 1));
  if (all.length <= MOST_SERIES) return all;
  const rest = all.splice(MOST_SERIES - 1);
  return [...all, { name: `${rest.length} others`, sum: sum(rest, (one) => one.sum), values: heap(rest, days) }];
}

const heap = (series, days) => days.map((_, at) => sum(series, (one) => one.values[at]));
const short = (n) => n >= 1e9 ? `${n / 1e9}G` : n >= 1e6 ? `${n / 1e6}M` : n >= 1e3 ? `${n / 1e3}k` : String(n);
const shortDay = (day) => day && new Date(day).toLocaleDateString([], { month: "short", day: "numeric", timeZone: "UTC" });

// Bars of days on one another. uPlot draws on a canvas, so the colours are read from the style sheet.
function Chart({ days, series, range }) {
  const [over, setOver] = useState(null);
  const element = useRef();
  useEffect(() => {
    let [plot, gone] = [null, false];
    const draw = async () => {
      const { default: uPlot } = await import("../vendor/uplot.js");
      if (gone) return;
      plot?.destroy();
      const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
      const axis = { stroke: colour("--faint"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
      const bars = { width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [0.75, 48] }) };
      plot = new uPlot({
        width: element.current.clientWidth, height: 220, legend: { show: false },
        scales: { x: { time: false, range: [-0.5, days.length - 0.5] }, y: { range: (_, least, most) => [0, most * 1.05 || 1] } },
        axes: [
          { ...axis, size: 30, grid: { show: false }, incrs: [1, 2, 5, 10, 30, 90, 365], space: 60,
            values: (_, splits) => splits.map((at) => shortDay(days[at])) },
          { ...axis, size: 64, values: (_, splits) => splits.map((value) => Number.isInteger(value) ? short(value) : "") },
        ],
        cursor: { y: false, drag: { x: false, y: false }, points: { show: false } },
        hooks: { setCursor: [(u) => setOver(u.cursor.idx ?? null)] },
        // The last series is on top: it is drawn first, as high as all together.
        series: [{}, ...series.map((_, index) => ({ ...bars, fill: colour(`--series-${index}`) })).reverse()],
      }, [days.map((_, at) => at), ...series.map((_, index) => heap(series.slice(0, index + 1), days)).reverse()], element.current);
    };
    const resized = new ResizeObserver(draw); // draws at the beginning, too
    resized.observe(element.current);
    const dark = matchMedia("(prefers-color-scheme: dark)");
    dark.addEventListener("change", draw);
    return () => {
      gone = true;
      resized.disconnect();
      dark.removeEventListener("change", draw);
      plot?.destroy();
      setOver(null);
    };
  }, [days, series]);
  const day = days[over];
  return html`<div class="card"><div class="chart" ref=${element} aria-hidden="true" />
    <ul class="legend" aria-label=${day || "Sums"}><li class="faint">${day || RANGES.find(([days]) => days === range)[1]}</li>
      ${series.map((one, index) => html`<li key=${one.name}><i class=${`series-${index}`} aria-hidden="true" />${one.name}
        <b class="number">${count(day ? one.values[over] : one.sum)}</b></li>`)}</ul></div>`;
}

function useUsage(range) {
  return useAnswer(async (before) => {
    const usage = { ...await call("GET", `/v1/usage${range ? `?since=${firstDay(Number(range))}` : ""}`), range };
    return JSON.stringify(usage) === JSON.stringify(before) ? before : usage; // the chart is not drawn again
  }, EVERY_MS, [range]);
}

function daysOf({ rows, range }) {
  const first = range ? firstDay(Number(range)) : rows.length ? rows.at(-1).day : isoDay(Date.now());
  const days = [];
  for (let at = Date.parse(first); at <= Date.now(); at += DAY_MS) days.push(isoDay(at));
  return days;
}

function UsageTable({ usage }) {
  const [all, setAll] = useState(false);
  const rows = all ? usage.rows : usage.rows.slice(0, MOST_ROWS);
  const counts = (row) => COUNTS.map(([name, title]) => html`<td class="number" data-name=${title}>${count(row[name])}</td>`);
  return html`<div class="scroll"><table class="usage folds" aria-labelledby="usage-title">
    <thead><tr><th>Day (UTC)</th><th>Key</th><th>Model</th>${COUNTS.map(([, title]) => html`<th class="number">${title}</th>`)}</tr></thead>
    <tbody>${rows.map((row) => html`<tr key=${`${row.day} ${row.key} ${row.model}`}>
      <td>${row.day}</td><td>${row.key || "no key"}</td><td class="break">${row.model}</td>${counts(row)}</tr>`)}</tbody>
    <tfoot><tr><td colspan="3">Total</td>${counts(usage.total)}</tr></tfoot>
  </table></div>
  ${rows.length < usage.rows.length && html`<${Button} onClick=${() => setAll(true)}>Show all ${count(usage.rows.length)} rows<//>`}`;
}

function Usage({ ofAll }) {
  const [range, setRange] = useState("7");
  const [by, setBy] = useState("model");
  const [what, setWhat] = useState("");
  const [usage, wrong, read] = useUsage(range);
  const days = useMemo(() => usage && daysOf(usage), [usage]);
  const series = useMemo(() => usage && seriesOf(usage.rows, days, by, what), [usage, by, what]);
  return html`<${Section} title="Usage">
    <div class="fields">
      <${Choice} label="Days" value=${range} options=${RANGES} onChange=${setRange} />
      <${Choice} label="By" value=${by} onChange=${setBy}
        options=${[["model", "Model"], ...(ofAll ? [["key", "Key"]] : []), [KINDS, "In, from cache, out"]]} />
      ${by !== KINDS && html`<${Choice} label="Show" value=${what} options=${SHOWN} onChange=${setWhat} />`}
      <${Button} onClick=${read} label="Refresh the usage">Refresh<//>
    </div>
    ${reading("The usage", usage, wrong)}
    ${usage && (usage.rows.length ? html`
      <${Chart} days=${days} series=${series} range=${usage.range} />
      ${usage.more && html`<p class="small">There are more rows than one answer holds, and the latest are shown. The total is that of all.</p>`}
      <${UsageTable} usage=${usage} />`
      : html`<${Empty}>Nothing was counted on these days.<//>`)}<//>`;
}

export function Keys({ picture }) {
  const keys = () => picture.auth === "none" ? html`<${Section} title="Keys"><${Switched} what="Keys are" /><//>` : html`<${KeyTable} />`;
  return html`<h2 tabindex="-1">${picture.admin ? "Keys and usage" : "Usage"}</h2>
    ${picture.admin && keys()}<${Usage} ofAll=${Boolean(picture.supervisor)} />`;
}
