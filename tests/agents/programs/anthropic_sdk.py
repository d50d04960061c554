"""The package anthropic: a stream, a call with its result, a second turn, a cancelled stream."""

import json

from anthropic import Anthropic

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}
TOOLS = [{"name": "get_weather", "description": "Tell the weather.", "input_schema": SCHEMA}]
client = Anthropic()
options = {"model": "replaying", "max_tokens": 1000}
messages = [{"role": "user", "content": "say plain"}]
with client.messages.stream(messages=messages, **options) as stream:
    streamed = "".join(stream.text_stream)
messages += [{"role": "assistant", "content": streamed}, {"role": "user", "content": "say weather"}]
with client.messages.stream(messages=messages, tools=TOOLS, **options) as stream:
    answer = stream.get_final_message()
(call,) = [block for block in answer.content if block.type == "tool_use"]
result = {"type": "tool_result", "tool_use_id": call.id, "content": "say plain"}
messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
after = client.messages.create(messages=messages, tools=TOOLS, **options).content[-1].text
say = [{"role": "user", "content": "say long"}]
with client.messages.stream(model="slow", max_tokens=1000, messages=say) as stream:
    next(iter(stream))
print(json.dumps([{"streamed": streamed, "called": call.input, "after": after}]))
