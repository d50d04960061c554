"""The package litellm, over chat completions, and over Anthropic's API."""

import json
import os

import litellm

litellm.telemetry = False
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


def ask(provider, **options):
    def complete(model, messages, **more):
        return litellm.completion(model=f"{provider}/{model}", messages=messages, max_tokens=1000, **options, **more)

    messages = [{"role": "user", "content": "say plain"}]
    chunks = list(complete("replaying", messages, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    messages += [{"role": "assistant", "content": streamed}, {"role": "user", "content": "say weather"}]
    message = complete("replaying", messages, tools=TOOLS).choices[0].message
    (call,) = message.tool_calls
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "say plain"}]
    after = complete("replaying", messages, tools=TOOLS).choices[0].message.content
    next(iter(complete("slow", [{"role": "user", "content": "say long"}], stream=True)))
    return {"streamed": streamed, "called": json.loads(call.function.arguments), "after": after}


root = os.environ["GATEWAY"]
print(json.dumps([ask("openai", api_base=f"{root}/v1"), ask("anthropic", api_base=root)]))
