"""The package openai: chat completions, then Responses. Each streams, calls, goes on, and cancels a stream."""

import json

from openai import OpenAI

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Tell the weather.", "parameters": PARAMETERS}
client = OpenAI()


def chat():
    messages = [{"role": "user", "content": "say plain"}]
    chunks = list(client.chat.completions.create(model="replaying", messages=messages, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    messages += [{"role": "assistant", "content": streamed}, {"role": "user", "content": "say weather"}]
    tools = [{"type": "function", "function": FUNCTION}]
    message = client.chat.completions.create(model="replaying", messages=messages, tools=tools).choices[0].message
    (call,) = message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "say plain"}]
    after = client.chat.completions.create(model="replaying", messages=messages, tools=tools).choices[0].message.content
    stream = client.chat.completions.create(
        model="slow", messages=[{"role": "user", "content": "say long"}], stream=True
    )
    next(iter(stream))
    stream.close()
    return {"streamed": streamed, "called": json.loads(call.function.arguments), "after": after}


def responses():
    with client.responses.stream(model="replaying", input="say plain") as stream:
        first = stream.get_final_response()
    tools = [{"type": "function", **FUNCTION}]
    items = [{"role": "user", "content": "say plain"}, *first.output, {"role": "user", "content": "say weather"}]
    second = client.responses.create(model="replaying", input=items, tools=tools)
    (call,) = [item for item in second.output if item.type == "function_call"]
    items += [*second.output, {"type": "function_call_output", "call_id": call.call_id, "output": "say plain"}]
    after = client.responses.create(model="replaying", input=items, tools=tools).output_text
    stream = client.responses.create(model="slow", input="say long", stream=True)
    next(iter(stream))
    stream.close()
    return {"streamed": first.output_text, "called": json.loads(call.arguments), "after": after}


print(json.dumps([chat(), responses()]))
