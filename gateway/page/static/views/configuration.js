// The view Configuration, for administrators: models.yaml as it is on the disk, its faults and values, and what a reload would change.
import {
  Button, Empty, html, inWords, Mark, order, reading, Section, Switched, Icon, useAnswer, useEffect, useMemo, useRef, useState,
} from "../ui.js";
import { call } from "../session.js";

const CHANGES = {
  settings: "settings apply, the workers stay", workers: "the workers are replaced one by one", added: "is added", removed: "is removed",
};
const STATES = { waiting: "off", running: "busy", done: "ready", failed: "failed" };

function Faults({ problems, goTo }) {
  return html`<p><${Mark} kind="failed">A reload would be refused: ${problems.length} ${problems.length === 1 ? "fault" : "faults"}<//></p>
    <ul class="config-faults">${problems.map((fault) => html`<li>
      ${fault.line ? html`<${Button} kind="plain" onClick=${() => goTo(fault.line)}>Line ${fault.line}<//> ` : html`${fault.place}: `}
      ${fault.key && html`<code>${fault.key}</code> `}${fault.message}</li>`)}</ul>`;
}

function Changes({ changes }) {
  const models = Object.entries(changes.models);
  if (!models.length && !changes.settings.length) {
    return html`<p class="reload-none"><${Mark} kind="ready">Nothing: what is served is what the file says<//></p>`;
  }
  return html`<ul>
    ${models.map(([name, change]) => html`<li key=${name}><b>${name}</b>: ${CHANGES[change] || change}</li>`)}
    ${changes.settings.map((key) => html`<li key=${key}><code>${key}</code> has another value</li>`)}</ul>`;
}

// What became of a reload, from the live picture.
function Result({ done }) {
  const changed = done.models.filter((model) => model.change !== "unchanged");
  return html`<h4>${done.running ? "The reload goes on" : "The reload is complete"}</h4>
    ${!changed.length && !done.settings.length && html`<p>It has changed nothing.</p>`}
    <ul>${done.settings.map((key) => html`<li key=${key}><code>${key}</code> applied</li>`)}
      ${changed.map((model) => html`<li key=${model.model}><b>${model.model}</b> (${model.change}): ${" "}
        <${Mark} kind=${STATES[model.state]}>${inWords(model.state)}<//>${model.message && ` ${model.message}`}</li>`)}</ul>`;
}

function File({ text, problems, line }) {
  const lines = useMemo(() => text.replace(/\n$/, "").split("\n"), [text]);
  const marked = useRef();
  useEffect(() => marked.current?.focus(), [line]);
  const faults = (number) => problems.filter((fault) => fault.line === number);
  return html`<ol class="config-lines">${lines.map((one, at) => {
    const wrong = faults(at + 1), chosen = line.number === at + 1;
    return html`<li class=${wrong.length ? "wrong" : ""} tabindex=${chosen ? -1 : undefined} ref=${chosen ? marked : undefined}>
      <code>${one || " "}</code>${wrong.map((fault) => html`<p class="error"><${Icon} name="failed" />${fault.message}</p>`)}</li>`;
  })}</ol>`;
}

function Values({ settings, more, goTo }) {
  const [wanted, setWanted] = useState("");
  const found = settings.filter((one) => one.key.includes(wanted.trim()));
  return html`<label class="config-find">Find a key <input type="search" value=${wanted} onInput=${(event) => setWanted(event.target.value)} /></label>
    ${found.length ? html`<dl class="config-values">${found.map((one) => html`<div key=${one.key}><dt>${one.key}</dt><dd><code>${one.value}</code></dd>
      <dd class="faint small">${one.line ? html`<${Button} kind="plain" onClick=${() => goTo(one.line)}>${one.source}<//>` : one.source}</dd>
    </div>`)}</dl>` : html`<${Empty}>No key is called so.<//>`}
    ${more && html`<${Empty}>There are more than fit here: <code>modelctl config</code> shows all.<//>`}`;
}

function Read({ picture }) {
  const [values, setValues] = useState(false);
  const [all, setAll] = useState(false);
  const [line, setLine] = useState({});
  const [ordered, setOrdered] = useState(null);
  const turnovers = picture.supervisor?.turnovers || [];
  const done = turnovers.find((turnover) => turnover.number === ordered);
  // Read it again when somebody has reloaded it, or when the supervisor has refused it.
  const [file, wrong, read] = useAnswer(() => call("GET", `/v1/config?all=${all}`), 0,
    [all, turnovers.at(-1)?.number, turnovers.at(-1)?.running, picture.supervisor?.troubles?.config]);
  const reload = async () => {
    const answer = await order("Reload", () => call("POST", "/v1/reload"));
    if (answer) setOrdered(answer.turnover);
    else read();
  };
  const goTo = (number) => { setValues(false); setLine({ number }); };
  if (!file) return reading("The configuration", file, wrong);
  const choice = (text, is) => html`<${Button} kind=${values === is ? "" : "quiet"} aria-pressed=${values === is}
    onClick=${() => setValues(is)}>${text}<//>`;
  return html`
    <div class="row"><p class="config-path"><code>${file.file}</code></p>
      <${Button} onClick=${read}>Refresh<//><${Button} kind="" onClick=${reload}>Reload<//></div>
    ${reading("The configuration", file, wrong)}
    <section class="card" aria-labelledby="changes-title">
      <h3 id="changes-title">What a reload would change</h3>
      ${file.changes ? html`<${Changes} changes=${file.changes} />` : html`<${Faults} problems=${file.problems} goTo=${goTo} />`}
      ${file.notes.map((note) => html`<p class="faint">${note}</p>`)}
      <p class="faint small">The models' directories are not read here: <code>modelctl check</code> reads them, too.</p>
      <div class="config-result" role="status">${done && html`<${Result} done=${done} />`}</div>
    </section>
    <${Section} title=${values ? "Values" : "File"} id="content-title" tools=${html`
      ${values && html`<label class="row"><input type="checkbox" checked=${all} onChange=${(event) => setAll(event.target.checked)} /> Defaults, too</label>`}
      <div class="row" role="group" aria-label="Show">${choice("File", false)}${choice("Values", true)}</div>`}>
      ${values ? html`<${Values} settings=${file.settings} more=${file.more} goTo=${goTo} />`
        : html`<${File} text=${file.text} problems=${file.problems} line=${line} />`}<//>`;
}

export function Configuration({ picture }) {
  return html`<h2 tabindex="-1">Configuration</h2>
    ${picture.auth === "none" ? html`<${Switched} what="The file models.yaml and its values are" />`
      : picture.admin ? html`<${Read} picture=${picture} />` : html`<${Empty}>This takes a key with the right admin.<//>`}`;
}
