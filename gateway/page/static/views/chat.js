import { address, Bar, Button, Choice, Copy, Empty, html, State, useEffect, useLayoutEffect, useRef, useState } from "../ui.js";
import { answer, canContinue, fresh, isRunning, kept, remove, set, stop, useConversations } from "../conversations.js";
import { call } from "../session.js";
import { choices, ModelChoice } from "../model_choice.js";
import { Markdown } from "../markdown.js";

const FIELDS = [["temperature", "Temperature", 0, 10], ["max_tokens", "Max tokens", 1], ["top_p", "Top P", 0, 1], ["min_p", "Min P", 0, 1], ["seed", "Seed"]];
const ENDED = { stopped: "Stopped.", length: "Cut off: Max tokens, or the end of the context.", loop: "Ended, because it repeated itself." };

let next = fresh(); // the conversation that the next message begins
let preferred = ""; // the model that a person has chosen

function download(chat) {
  const url = URL.createObjectURL(new Blob([JSON.stringify(kept(chat), null, 2)], { type: "application/json" }));
  Object.assign(document.createElement("a"), { href: url, download: `chat-${chat.id}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function Conversations({ chats, current }) {
  return html`<details class="conversations" open=${matchMedia("(min-width: 56rem)").matches}>
    <summary>Conversations (${chats.length})</summary>
    <ul>${chats.map((chat) => html`<li key=${chat.id}>
      <a href=${address("chat", chat.id)} aria-current=${chat === current ? "page" : undefined}><bdi>${chat.title}</bdi></a></li>`)}</ul>
  </details>`;
}

function Named({ chat }) {
  const rename = () => {
    const title = prompt("Name of the conversation", chat.title)?.trim();
    if (title) set(chat, { title });
  };
  const drop = () => {
    if (!confirm(`Delete the conversation "${chat.title}" from this browser?`)) return;
    remove(chat);
    location.hash = "#/chat";
  };
  return html`<div class="row small-buttons"><h3><bdi>${chat.title}</bdi></h3>
    <${Button} onClick=${rename}>Rename<//>
    <${Button} onClick=${() => download(chat)}>Export<//>
    <${Button} kind="danger" onClick=${drop}>Delete<//></div>`;
}

// What models.yaml says for options that a request leaves out, by their names, as far as this key may read it.
function useOwnValues(name) {
  const [values, setValues] = useState({});
  useEffect(() => {
    setValues({});
    if (name) call("GET", `/v1/models/${name}`).then(({ modelctl }) => {
      const text = (part) => (modelctl.settings || []).filter(({ key }) => key.startsWith(`models.${name}.${part}`))
        .map(({ key, value }) => `${key}: ${value}`).join("\n");
      const number = (option) => ["forced", "sampling"].map((part) => text(part).match(`\\b${option}: ([-.\\d]+)`)?.[1]).find(Boolean);
      setValues(Object.fromEntries(FIELDS.map(([option]) => [option, number(option)])));
    }, () => {});
  }, [name]);
  return values;
}

function Options({ chat, plain, model }) {
  const own = useOwnValues(model);
  const option = (name) => (value) => set(chat, { options: { ...chat.options, [name]: value } });
  const text = (name) => (event) => set(chat, { [name]: event.target.value });
  const number = Object.values(chat.options).filter((value) => value !== "").length;
  return html`<details class="options">
    <summary>Options${number ? ` (${number} set)` : ""}</summary>
    ${!plain && html`<label>System prompt <textarea rows="3" value=${chat.system} onInput=${text("system")} /></label>`}
    <div class="fields">
      ${FIELDS.map(([name, title, min, max]) => html`<label key=${name}>${title} <input type="number" step="any" min=${min} max=${max}
        placeholder=${own[name] ?? "default"} value=${chat.options[name] ?? ""} onInput=${(event) => option(name)(event.target.value)} /></label>`)}
      ${!plain && html`<${Choice} label="Reasoning effort" value=${chat.options.reasoning_effort ?? ""} onChange=${option("reasoning_effort")}
        options=${["", "low", "medium", "high"].map((value) => [value, value || "default"])} />`}
    </div>
    ${!plain && html`<label>Tools, as the JSON list of a request <textarea rows="2" spellcheck="false" value=${chat.tools} onInput=${text("tools")} /></label>`}
  </details>`;
}

// What a request waits for before its first token.
function Waiting({ model }) {
  const worker = model?.workers.find((one) => one.state === "ready") || model?.workers[0];
  if (!worker || worker.state === "ready") return html`<p class="none">Waiting for the first token …</p>`;
  const { done, total } = worker.progress || {};
  return html`<div class="waiting"><p>The model is not ready yet: <${State} worker=${worker} /></p>
    ${total ? html`<${Bar} held=${done / total} />` : null}</div>`;
}

function UserTurn({ turn, edit }) {
  return html`<li class="user"><p class="who">You</p><p class="text">${turn.content}</p>
    <div class="row small-buttons"><${Copy} text=${turn.content} label="Copy the message" />
      ${edit && html`<${Button} onClick=${edit} label="Edit the message">Edit<//>`}</div></li>`;
}

function AnswerTurn({ turn, running, again, goOn }) {
  return html`<li class="assistant"><p class="who">${turn.model}</p>
    ${turn.reasoning && html`<details><summary>Reasoning</summary><p class="text">${turn.reasoning}</p></details>`}
    ${turn.plain ? html`<p class="text">${turn.content}</p>` : html`<${Markdown} text=${turn.content} />`}
    ${turn.calls.map((call, i) => html`<details key=${i}><summary>Calls <code>${call.name}</code></summary><pre tabindex="0">${call.arguments}</pre></details>`)}
    ${turn.error ? html`<p class="error">${turn.error}</p>` : ENDED[turn.ended] && html`<p class="none small">${ENDED[turn.ended]}</p>`}
    ${!running && html`<div class="row small-buttons"><${Copy} text=${turn.content} label="Copy the answer" />
      ${goOn && html`<${Button} onClick=${goOn}>Continue<//>`}
      ${again && html`<${Button} onClick=${again}>Regenerate<//>`}
      <output class="timings small faint">${turn.timings}</output></div>`}</li>`;
}

// The window stays at its end while an answer grows, unless a person has scrolled up.
function useEnd(grows) {
  const atEnd = useRef(true);
  const element = document.documentElement;
  useLayoutEffect(() => {
    const look = () => { atEnd.current = element.scrollHeight - element.clientHeight - scrollY < 80; };
    addEventListener("scroll", look, { passive: true });
    return () => removeEventListener("scroll", look);
  }, []);
  useLayoutEffect(() => {
    if (grows && atEnd.current) scrollTo(0, element.scrollHeight);
  });
}

export function Chat({ picture }) {
  const { chats, full } = useConversations(picture.key);
  const field = useRef();
  const id = location.hash.split("/")[2]; // replaceState changes it without an event
  if (chats.includes(next)) next = fresh();
  const chat = id ? chats.find((one) => one.id === id) : next;
  const running = chat ? isRunning(chat) : false;
  useEnd(running);
  const head = html`<div class="row"><h2 tabindex="-1">Chat</h2><a href="#/chat">New conversation</a></div>
    ${full && html`<p class="notice" role="alert">This browser's storage is full. What is new here is not kept: export it, or delete other conversations.</p>`}`;
  const list = html`<${Conversations} chats=${chats} current=${chat} />`;
  if (!chat) return html`${head}<div class="chat">${list}<${Empty}>This browser has no such conversation of this key.<//></div>`;

  const all = choices(picture);
  const name = chat.model || (all.some((one) => one.id === preferred) ? preferred : all[0]?.id) || "";
  const model = all.find((one) => one.id === name);
  const plain = model?.plain || false;
  const last = chat.turns.at(-1);
  const turnsBefore = (i) => chat.turns.slice(0, i);

  const request = (asked, more = {}) => {
    try {
      if (chat.tools.trim()) JSON.parse(chat.tools);
    } catch (error) {
      return set(chat, { error: `Tools: ${error.message}` });
    }
    chat.model = name;
    if (!id) history.replaceState(null, "", address("chat", chat.id));
    return answer(chat, asked, { plain, ...more });
  };
  const send = (event) => {
    event.preventDefault();
    if (running || !chat.draft.trim() || !name) return;
    request([...turnsBefore(chat.editing ?? chat.turns.length), { role: "user", content: chat.draft }]);
  };
  const edit = (i) => {
    set(chat, { draft: chat.turns[i].content, editing: i });
    field.current.focus();
  };
  const again = () => request(last.role === "user" ? chat.turns : turnsBefore(-1), { draft: "" });
  // One button is both, so that the focus stays on it. A click on Stop must not send what is written meanwhile.
  const halt = (event) => { event.preventDefault(); stop(chat); };
  const choose = (model) => set(chat, { model: preferred = model });
  return html`${head}<div class="chat">${list}<div class="conversation">
    ${id && html`<${Named} chat=${chat} />`}
    <div class="settings"><${ModelChoice} all=${all} name=${name} onChange=${choose} disabled=${running} />
      <${Options} chat=${chat} plain=${plain} model=${model?.name === name ? name : ""} /></div>
    ${plain && html`<p class="none small">${name} has no chat template. It completes your text, and does not see what stands above it.</p>`}
    <ol class="turns">${chat.turns.map((turn, i) => turn.role === "user"
      ? html`<${UserTurn} key=${i} turn=${turn} edit=${!running && (() => edit(i))} />`
      : html`<${AnswerTurn} key=${i} turn=${turn} running=${running && turn === last} again=${!running && turn === last && again}
          goOn=${!running && turn === last && canContinue(turn) && (() => request(turnsBefore(-1), { begun: turn, draft: "" }))} />`)}
      ${running && last.role === "user" && html`<li class="assistant" key="waiting"><${Waiting} model=${model} /></li>`}</ol>
    ${!running && last?.role === "user" && html`<p class="none">No answer has come. <${Button} onClick=${again}>Ask again<//></p>`}
    <form class="composer card" onSubmit=${send} autocomplete="off">
      <p class="error" role="alert">${chat.error}</p>
      ${chat.editing !== null && html`<p class="row small">You edit an earlier message. What follows it will be dropped.
        <${Button} onClick=${() => set(chat, { editing: null, draft: "" })}>Cancel<//></p>`}
      <label class="hidden" for="chat-text">Message</label>
      <div class="field"><textarea id="chat-text" ref=${field} rows="1" placeholder="Enter sends, Shift+Enter makes a line" value=${chat.draft}
          onInput=${(event) => set(chat, { draft: event.target.value })}
          onKeyDown=${(event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && send(event)} />
        <${Button} kind=${running ? "quiet" : ""} type=${running ? "button" : "submit"} disabled=${!name}
          onClick=${running && halt}>${running ? "Stop" : "Send"}<//></div>
    </form></div></div>`;
}
