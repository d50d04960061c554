"""How the loaded model writes reasoning and calls of tools, and what of that a request asks for.

``answer_formats`` knows the families of models. This module chooses among them: by the chat template, or by the keys
``tool_format`` and ``reasoning`` of models.yaml.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from answer_formats.families import (
    beginnings_of,
    ends_of,
    has_headers,
    head_of,
    markers_of,
    opening_of,
    reasoning_tokens,
    recognise,
)
from answer_formats.parser import AnswerParser, ReasoningMarkers, Tool
from answer_formats.parts import CallArguments, CallStart
from model_worker.conversations import Form
from model_worker.engine import ChatTemplate, Layout, Place
from model_worker.template_probes import NAME, SCHEMA, VALUES
from protocol.errors import RequestError
from protocol.process.worker_spec import OFF, WorkerSpec
from protocol.request import GenerateRequest

GENERAL: Final = "json"
"""The format for models whose chat template shows no calls."""
LONGEST_TOOLS: Final = 1 << 19
"""Characters of JSON of the tools of a request, without their descriptions."""


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model writes, and what its chat template can take.

    tools      name of the format of its calls; None if it is not known
    reasoning  the markers before and behind its reasoning; None if it does not reason, or its markers are not known
    parallel   whether an answer may have several calls
    tried      whether the reader of the format of calls has read a call that the template wrote, or the format is the
               general one, or models.yaml names it
    forms      what the chat template can take: without tools, and with tools; empty without a template
    headers    name of the format whose headers the model writes, although ``tool_format: off`` leaves its calls alone
    """

    tools: str | None = None
    reasoning: tuple[str, str] | None = None
    parallel: bool = True
    tried: bool = True
    forms: tuple[Form, ...] = ()
    headers: str | None = None

    @classmethod
    def of(cls, template: ChatTemplate | None, spec: WorkerSpec | None, forms: Sequence[Form] = ()) -> "AnswerFormat":
        """Return the format of a model with this chat template. Keys of models.yaml come before the template.

        A format that the template shows is taken only if its reader can read the call that the template has written in
        a probe. If the template shows tools but writes no calls, the format is taken, and is not ``tried``. A template
        that shows no tools gets the general format.

        forms  as ``rendering.probe_template`` returns them
        """
        if template is None:
            return cls()
        tools, reasoning = recognise(template.source, template.tool_source)
        headers = None
        if spec is not None and spec.tool_format == OFF and tools is not None and has_headers(tools):
            headers = tools
        tried = True
        if forms and not forms[-1].error:
            form = forms[-1]
            general = not form.tools or not form.calls
            forms = [replace(one, general=general, parallel=one.parallel or general) for one in forms]
            if not form.tools:
                tools = GENERAL
            elif not form.calls:
                tried = False
            elif tools is not None and not reads_back(tools, form.call, reasoning):
                tools = None
        if spec is not None and spec.tool_format is not None:
            tools, tried = None if spec.tool_format == OFF else spec.tool_format, True
        if spec is not None and spec.reasoning is not None:
            reasoning = None if spec.reasoning == OFF else spec.reasoning
        return cls(tools, reasoning, all(form.parallel for form in forms[-1:]), tried, tuple(forms), headers)

    @property
    def family(self) -> str | None:
        """The name of the format in which the model writes its answers, with calls or without; None if not known."""
        return self.tools or self.headers

    @property
    def template_error(self) -> str:
        """Why the chat template can render no conversation; "" if it can, or if there is no template."""
        return self.forms[0].error and self.forms[-1].error if self.forms else ""

    @property
    def template_changes(self) -> str:
        """What the template makes of conversations, in a line for people."""
        if self.template_error:
            return f"completions only: {self.template_error}"
        return ", ".join(dict.fromkeys(text for form in self.forms for text in form.changes()))

    @property
    def has_head(self) -> bool:
        """Return whether something stands before the text of an answer, also before one that has a shape."""
        return self.family is not None and bool(head_of(self.family))

    @property
    def ends(self) -> tuple[str, ...]:
        """Return the special tokens that end an answer, besides the model's own."""
        return () if self.family is None else ends_of(self.family)

    def layout(self, request: GenerateRequest, place: Place) -> Layout:
        """Return how the answer to a request is written. ``place``: where its prompt ends."""
        markers = frozenset[str]()
        tools = self.tools if request.tools else None
        if request.with_format:
            markers = frozenset(reasoning_tokens(self.reasoning) if self.reasoning is not None else ())
            if self.family is not None and (tools is not None or self.has_head):
                markers = markers.union(markers_of(self.family))
        return Layout(
            visible=markers,
            reasoning=self.reasoning,
            place=place,
            calls=() if tools is None else beginnings_of(tools),
            opening="" if tools is None else opening_of(tools),
            stops=request.with_format,
            waits=request.with_format or request.reasoning_budget is not None,
            budget=request.reasoning_budget,
        )

    def place(self, rendered: str, continued: str | None) -> Place:
        """Return where a prompt ends: before a possible reasoning, inside it, or behind it.

        The template decides that, and clients choose among its ways by variables. So look at the text. Only blanks may
        stand between a marker and the prompt's end, because a user's message may hold a marker, too.

        continued  the text of the message that the answer continues; None if the answer is a message of its own
        """
        if self.reasoning is None:
            return "behind"
        text = rendered.rstrip() if continued is None else continued
        start, end = (text.rfind(marker) + len(marker) if marker in text else -1 for marker in self.reasoning)
        if continued is not None:
            return "inside" if start > end else "behind"
        return "inside" if start == len(text) else "behind" if end == len(text) else "before"

    def to_wire(self, *, inside: bool) -> dict[str, Any]:
        """Return protocol.bodies.AnswerFormat. ``inside``: whether the prompt ended within the reasoning."""
        headers = {} if self.headers is None else {"headers": self.headers}
        reasoning = list(self.reasoning) if self.reasoning else None
        return {"tools": self.tools, "reasoning": reasoning, "inside": inside, **headers}


def reads_back(format: str, call: str, reasoning: tuple[str, str] | None = None) -> bool:
    """Return whether the reader of a format finds the probes' call in a text, with its name and its arguments."""
    markers = None if reasoning is None else ReasoningMarkers(*reasoning)
    parser = AnswerParser(tool_format=format, tools=[Tool(NAME, SCHEMA)], reasoning=markers)
    parts = [*parser.feed(call), *parser.finish()]
    names = [part.name for part in parts if isinstance(part, CallStart)]
    arguments = "".join(part.json for part in parts if isinstance(part, CallArguments))
    try:
        return names == [NAME] and json.loads(arguments) == VALUES
    except ValueError:
        return False


def calls_text(request: GenerateRequest, format: str, parallel: bool = True) -> str:
    """Return the constraint of the calls that a request allows, as JSON. ``constraint_grammar`` reads it.

    If the request has a constraint of its own, an answer without calls has that shape.

    parallel  whether the model's chat template shows several calls of one answer

    Raises RequestError for tools from which no constraint can be made.
    """
    tools = [_tool(number, given) for number, given in enumerate(request.tools or ())]
    names = {tool["name"] for tool in tools}
    if unknown := next((name for name in request.allowed_tools or () if name not in names), None):
        raise RequestError(f"allowed_tools names {unknown[:64]!r}, which is not one of tools", field="allowed_tools")
    allowed = names if request.allowed_tools is None else set(request.allowed_tools)
    text = json.dumps(
        {
            "format": format,
            "tools": [tool for tool in tools if tool["name"] in allowed],
            "required": request.tool_choice == "required",
            "parallel": request.parallel_tool_calls and parallel,
            "text": None if request.tool_choice == "required" else request.constraint,
        },
        ensure_ascii=False,
        separators=(",", ":"),
    )
    if len(text) > LONGEST_TOOLS:
        raise RequestError(
            f"tools has {len(text)} characters of JSON: at most {LONGEST_TOOLS} can constrain an answer", field="tools"
        )
    return text


def _tool(number: int, given: dict[str, Any]) -> dict[str, Any]:
    """Return {name, parameters, strict} of a tool in OpenAI's shape."""
    function = given.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise RequestError(f"tools[{number}] must be {{type, function: {{name, parameters}}}}", field="tools")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise RequestError(f"tools[{number}].function.parameters must be a JSON schema, which is a map", field="tools")
    return {"name": name, "parameters": parameters or {}, "strict": function.get("strict") is True}


UNKNOWN: Final = AnswerFormat()
"""The format of a model of which nothing is known."""
