"""The chat template of the model ``agent``, and the same rendering in Python, for the training text and for tests.

The form is the one that many chat models have: turns between ``<|im_start|>`` and ``<|im_end|>``, the tools as JSON in
the system turn, calls as JSON between ``<tool_call>`` and ``</tool_call>``, results between ``<tool_response>`` and
``</tool_response>`` in a turn of the user, and reasoning between ``<think>`` and ``</think>``.

Reasoning of the messages before the last user message is left out. The variable ``enable_thinking`` set to false ends
the prompt with empty reasoning, so that the model answers at once.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

Message = dict[str, Any]
"""A message of OpenAI's chat API: ``role``, ``content``, and for the assistant ``tool_calls`` and
``reasoning_content``."""

Tool = dict[str, Any]
"""A tool as OpenAI's chat API has it: ``{"type": "function", "function": {"name": …, "parameters": …}}``."""

_BEFORE_TOOLS: Final = "# Tools\n\nYou may call these functions:\n<tools>"
_AFTER_TOOLS: Final = (
    "\n</tools>\n\nWrite each call in this form:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)
NO_REASONING: Final = "<think>\n\n</think>\n\n"

CHAT_TEMPLATE: Final = (
    "{%- set first = messages[0].content if messages[0].role == 'system' else none %}"
    "{%- if tools or first is not none %}"
    "{{- '<|im_start|>system\n' + (first or '') }}"
    "{%- if tools %}"
    "{{- ('\n\n' if first else '') + " + json.dumps(_BEFORE_TOOLS) + " }}"
    "{%- for tool in tools %}{{- '\n' + tool | tojson }}{%- endfor %}"
    "{{- " + json.dumps(_AFTER_TOOLS) + " }}"
    "{%- endif %}"
    "{{- '<|im_end|>\n' }}"
    "{%- endif %}"
    "{%- set ns = namespace(asked=-1) %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}"
    "{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- elif message.role == 'assistant' %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if message.reasoning_content and loop.index0 > ns.asked %}"
    "{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}"
    "{%- endif %}"
    "{{- message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}"
    "{{- '\n' if message.content or not loop.first else '' }}"
    '{{- \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{- '}\n</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|im_end|>\n' }}"
    "{%- elif message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}"
    "{%- elif message.role != 'system' %}"
    "{{- raise_exception('unknown role ' + message.role) }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- "
    + json.dumps(NO_REASONING)
    + " }}{%- endif %}"
    "{%- endif %}"
)
"""The chat template of the model ``agent``, in Jinja."""


def call_text(name: str, arguments: Any) -> str:
    """Return a call of a tool as the model writes it. ``arguments`` is an object, or JSON that is kept as it is."""
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {written}}}\n</tool_call>'


def body_text(content: str | None, calls: Sequence[tuple[str, Any]]) -> str:
    """Return what an assistant says behind its reasoning: text, and then calls, each on lines of its own."""
    return "\n".join([*([content] if content else []), *(call_text(name, arguments) for name, arguments in calls)])


def render_pieces(
    messages: Sequence[Message], tools: Sequence[Tool] = (), thinking: bool = True
) -> list[tuple[str, bool]]:
    """Return a conversation as the chat template renders it, in pieces (text, whether the assistant says it).

    The last piece is the start of the next answer. All pieces together are the prompt.

    thinking  the variable ``enable_thinking``
    """
    pieces: list[tuple[str, bool]] = []
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    if tools or system is not None:
        text = system or ""
        if tools:
            described = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
            text += ("\n\n" if system else "") + _BEFORE_TOOLS + described + _AFTER_TOOLS
        pieces.append((f"<|im_start|>system\n{text}<|im_end|>\n", False))
    asked = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
    for i, message in enumerate(messages):
        role, content = message["role"], message.get("content") or ""
        if role == "assistant":
            calls = [call["function"] for call in message.get("tool_calls") or []]
            said = body_text(content, [(call["name"], call["arguments"]) for call in calls])
            if message.get("reasoning_content") and i > asked:
                said = f"<think>\n{message['reasoning_content']}\n</think>\n\n{said}"
            pieces += [("<|im_start|>assistant\n", False), (f"{said}<|im_end|>", True), ("\n", False)]
        elif role == "tool":
            before = "" if i and messages[i - 1]["role"] == "tool" else "<|im_start|>user"
            after = "" if i + 1 < len(messages) and messages[i + 1]["role"] == "tool" else "<|im_end|>\n"
            pieces.append((f"{before}\n<tool_response>\n{content}\n</tool_response>{after}", False))
        elif i or role == "user":
            pieces.append((f"<|im_start|>{role}\n{content}<|im_end|>\n", False))
    pieces.append(("<|im_start|>assistant\n" + ("" if thinking else NO_REASONING), False))
    return pieces


def render_agent(messages: Sequence[Message], tools: Sequence[Tool] = (), thinking: bool = True) -> str:
    """Return the prompt that the chat template makes of a conversation."""
    return "".join(text for text, _ in render_pieces(messages, tools, thinking))
