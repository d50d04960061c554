// Ask a gateway with the npm package openai, and print the answers as JSON.
//
//     node tests/npm_client.mjs BASE_URL DIRECTORY_OF_THE_PACKAGE
//
// Standard input has the message to send, and tools: {"story": "...", "tools": [...]}.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const [baseURL, directory] = process.argv.slice(2);
const { default: OpenAI } = createRequire(directory + "/")("openai");
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 3 });
const { story, tools } = JSON.parse(readFileSync(0, "utf8"));
const messages = [{ role: "user", content: story }];
const got = {};

got.models = [];
for await (const model of client.models.list()) got.models.push(model.id);

const whole = await client.chat.completions.create({ model: "stories", messages, temperature: 0 });
got.whole = whole.choices[0].message.content;

got.streamed = "";
got.chunks = 0;
const stream = await client.chat.completions.create({
  model: "stories", messages, temperature: 0, stream: true, stream_options: { include_usage: true },
});
for await (const chunk of stream) {
  got.streamed += chunk.choices[0]?.delta?.content ?? "";
  got.chunks += 1;
  got.usage = chunk.usage;
}

const helper = client.chat.completions.stream({ model: "stories", messages, temperature: 0 });
got.helped = (await helper.finalChatCompletion()).choices[0].message.content;

const shape = { type: "object", properties: { yes: { type: "boolean" } }, required: ["yes"], additionalProperties: false };
const shaped = await client.chat.completions.create({
  model: "stories", messages, response_format: { type: "json_schema", json_schema: { name: "x", strict: true, schema: shape } },
});
got.shaped = JSON.parse(shaped.choices[0].message.content);

// Reasoning, text and calls of tools: whole, as deltas, by the helper, and by the loop that runs the tools.
const asked = { model: "replaying", messages: [{ role: "user", content: "say thought" }], tools };
const calls = (message) => message.tool_calls.map(({ function: { name, arguments: text } }) => [name, JSON.parse(text)]);
const { message, finish_reason } = (await client.chat.completions.create(asked)).choices[0];
got.called = { reasoning: message.reasoning_content, content: message.content, calls: calls(message), finish_reason };

const put = { reasoning: "", content: "", tool_calls: [] };
for await (const chunk of await client.chat.completions.create({ ...asked, stream: true })) {
  const { delta, finish_reason } = chunk.choices[0];
  put.reasoning += delta.reasoning_content ?? "";
  put.content += delta.content ?? "";
  for (const { index, id, function: { name, arguments: text } } of delta.tool_calls ?? []) {
    if (id) put.tool_calls[index] = { function: { name, arguments: "" } };
    put.tool_calls[index].function.arguments += text;
  }
  put.finish_reason = finish_reason ?? put.finish_reason;
}
const { tool_calls, ...others } = put;
got.deltas = { ...others, calls: calls({ tool_calls }) };

const helping = client.chat.completions.stream(asked);
const final = (await helping.finalChatCompletion()).choices[0];
got.final = { content: final.message.content, calls: calls(final.message), finish_reason: final.finish_reason };

got.ran = [];
const runner = client.chat.completions.runTools({
  model: "replaying",
  messages: [{ role: "user", content: "say weather" }],
  stream: true,
  tools: tools.map(({ function: { name, description, parameters } }) => ({
    type: "function",
    function: {
      name, description: description ?? "", parameters, parse: JSON.parse,
      function: (given) => { got.ran.push([name, given]); return "say plain"; },
    },
  })),
});
got.after = await runner.finalContent();

// Leaving the loop closes the connection.
const endless = await client.completions.create({ model: "endless", prompt: "x", max_tokens: 90000, stream: true });
for await (const chunk of endless) {
  got.first = chunk.choices[0].text;
  break;
}

try {
  await client.completions.create({ model: "endless", prompt: "x", temperature: 99 });
} catch (error) {
  got.error = { kind: error.constructor.name, status: error.status, param: error.param, id: error.requestID };
}
console.log(JSON.stringify(got));
