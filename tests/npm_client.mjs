// Ask a gateway with the npm package openai, and print the answers as JSON.
//
//     node tests/npm_client.mjs BASE_URL DIRECTORY_OF_THE_PACKAGE
//
// Standard input has the message to send: {"story": "..."}.
import { createRequire } from "node:module";
import { readFileSync } from "node:fs";

const [baseURL, directory] = process.argv.slice(2);
const { default: OpenAI } = createRequire(directory + "/")("openai");
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 3 });
const { story } = JSON.parse(readFileSync(0, "utf8"));
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
