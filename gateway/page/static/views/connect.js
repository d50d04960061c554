import { Copy, Empty, html, Section, useState } from "../ui.js";
import { choices, ModelChoice } from "../model_choice.js";

// The text of each snippet for a gateway's address, the name of a model, and its context if that is known. docs/http-api.md has
// the same texts. A token is never filled in: it stands as TOKEN.
const SNIPPETS = [
  ["curl", "", (root, name) => `curl ${root}/v1/chat/completions \\
    -H "Authorization: Bearer TOKEN" -H "Content-Type: application/json" \\
    -d '{"model": "${name}", "messages": [{"role": "user", "content": "Hello"}]}'`],
  ["Python", "pip install openai", (root, name) => `from openai import OpenAI

client = OpenAI(base_url="${root}/v1", api_key="TOKEN")
answer = client.chat.completions.create(model="${name}", messages=[{"role": "user", "content": "Hello"}])
print(answer.choices[0].message.content)`],
  ["TypeScript", "npm install openai", (root, name) => `import OpenAI from "openai";

const client = new OpenAI({ baseURL: "${root}/v1", apiKey: "TOKEN" });
const answer = await client.chat.completions.create({ model: "${name}", messages: [{ role: "user", content: "Hello" }] });
console.log(answer.choices[0].message.content);`],
  ["Claude Code", "The model must call tools, and its context should have 32,768 tokens or more.", (root, name, context) => `export ANTHROPIC_BASE_URL=${root}
export ANTHROPIC_AUTH_TOKEN=TOKEN
export ANTHROPIC_MODEL=${name}
export ANTHROPIC_DEFAULT_HAIKU_MODEL=${name}
${context ? `export CLAUDE_CODE_MAX_CONTEXT_TOKENS=${context}\n` : ""}export CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1
claude`],
  ["Codex", "In ~/.codex/config.toml, with the token in the variable MODELCTL_TOKEN. The model must call tools.", (root, name) => `model = "${name}"
model_provider = "local"

[model_providers.local]
name = "local"
base_url = "${root}/v1"
wire_api = "responses"
env_key = "MODELCTL_TOKEN"`],
  ["Open WebUI", "", (root) => `export OPENAI_API_BASE_URL=${root}/v1
export OPENAI_API_KEY=TOKEN
export ENABLE_OLLAMA_API=false
open-webui serve`],
  ["Continue", "In ~/.continue/config.yaml.", (root, name) => `name: modelctl
version: 0.0.1
schema: v1
models:
  - name: ${name}
    provider: openai
    model: ${name}
    apiBase: ${root}/v1
    apiKey: TOKEN
    roles: [chat, edit, apply]`],
];
const NEW_KEY = "modelctl keys new NAME --http";

function Key({ picture }) {
  if (picture.auth === "none") return html`<p>This gateway asks for no token (<code>gateway: {auth: none}</code>). Programs that need one take any text.</p>`;
  return html`<p>Each program or person should have a token of its own. ${picture.admin
      ? html`<a href="#/keys">Make a key on this page</a>, or on the gateway's machine with this command:`
      : "Whoever runs this gateway makes one with this command:"}</p>
    <div class="row"><code>${NEW_KEY}</code> <${Copy} text=${NEW_KEY} label="Copy the command" /></div>
    <p class="none">The command shows the token once. Put it in the place of TOKEN below.</p>`;
}

export function Connect({ picture }) {
  const [chosen, setChosen] = useState("");
  const all = choices(picture);
  const model = all.find((one) => one.id === chosen) || all[0];
  const root = location.origin;
  return html`<h2 tabindex="-1">Connect</h2>
    <section class="card connect" aria-labelledby="base-title"><h3 id="base-title">Base address</h3>
      <div class="row"><code>${root}/v1</code> <${Copy} text=${`${root}/v1`} label="Copy the base address" /></div>
      <p class="none">For programs that speak OpenAI's API. Those that speak Anthropic's take <code>${root}</code>. <a href="/docs">All endpoints</a></p></section>
    <section class="card connect" aria-labelledby="key-title"><h3 id="key-title">Key</h3><${Key} picture=${picture} /></section>
    ${model ? html`<${Section} title="Programs">
      <${ModelChoice} all=${all} name=${model.id} onChange=${setChosen} />
      ${model.plain && html`<p class="none">${model.id} has no chat template. It completes texts at <code>/v1/completions</code>, and these programs need one that chats.</p>`}
      <div class="snippets">${SNIPPETS.map(([title, note, text]) => {
        const filled = text(root, model.id, model.workers[0].context);
        return html`<article class="card connect" key=${title} aria-label=${title}>
          <div class="row"><h4>${title}</h4><${Copy} text=${filled} label=${`Copy the snippet for ${title}`} /></div>
          ${note && html`<p class="none small">${note}</p>`}<pre tabindex="0" aria-label=${`Snippet for ${title}`}>${filled}</pre></article>`;
      })}</div><//>` : html`<${Empty}>models.yaml names no model, so there is nothing to connect to yet.<//>`}`;
}
