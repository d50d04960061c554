"""Make a job for the engine from the body of a request: validate, add the model's defaults and limits, tokenize.

The engine's ``submit`` decides whether the job fits and whether the engine offers what the job asks for.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from model_worker.embedding import EmbedJob
from model_worker.engine import PIECE, PLAIN, ChatTemplate, Engine, Job, Layout, LoadError, Place, PromptScoring
from model_worker.rendering import TemplateForm
from model_worker.template_probes import NAME, SCHEMA, VALUES
from protocol.answer_formats.families import (
    beginnings_of,
    ends_of,
    has_headers,
    head_of,
    markers_of,
    opening_of,
    reasoning_tokens,
    recognise,
)
from protocol.answer_formats.parser import AnswerParser, MarkerPair
from protocol.answer_formats.source import CallArguments, CallStart, Tool
from protocol.chat import ChatFields
from protocol.codec import unpack_body
from protocol.embedding import RerankRequest, parse_vectors
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.presets import PRESETS
from protocol.process.worker_spec import OFF, WorkerSpec
from protocol.request import GenerateRequest, parse_generate

# How the loaded model writes reasoning and calls of tools, and what of that a request asks for.
#
# ``protocol.answer_formats`` knows the families of models. This module chooses among them: by the chat template, or by
# the keys ``tool_format`` and ``reasoning`` of models.yaml.


GENERAL: Final = "json"
"""The format for models whose chat template shows no calls."""
LONGEST_TOOLS: Final = 1 << 19
"""Characters of JSON of the tools of a request, without their descriptions."""


@dataclass(frozen=True, slots=True)
class ModelTraits:
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
    forms: tuple[TemplateForm, ...] = ()
    headers: str | None = None

    @classmethod
    def of(
        cls, template: ChatTemplate | None, spec: WorkerSpec | None, forms: Sequence[TemplateForm] = ()
    ) -> "ModelTraits":
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
    markers = None if reasoning is None else MarkerPair(*reasoning)
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


UNKNOWN: Final = ModelTraits()
"""The format of a model of which nothing is known."""

NO_VARIANT: Final[Mapping[str, Any]] = MappingProxyType({})
MAX_BYTES_PER_TOKEN = 16
"""The most bytes of a prompt for each token of context. A longer prompt is refused before it is tokenized, because
tokenizing it would stall the loop. English text has 4 to 5 bytes per token."""

MOST_PROMPT_LOGPROBS: Final = 1 << 20
"""The most log-probabilities of a prompt. As JSON they take 40 to 80 MB, which a gateway holds for one request. It is
enough for 20 likeliest tokens at each place of 49,000 tokens."""

_LONGEST_END: Final = 256
"""Characters of the end of a turn that are looked at."""


class Intake:
    """Turns requests into jobs for one loaded engine.

    sampling, forced, limits  the model's, as in WorkerSpec
    format            how the model writes
    """

    def __init__(
        self,
        engine: Engine,
        sampling: Mapping[str, Any],
        limits: Mapping[str, Any],
        format: ModelTraits = UNKNOWN,
        forced: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._engine, self._format = engine, format
        self._capabilities = engine.capabilities
        self._sampling, self._limits, self._forced = sampling, limits, forced
        ends = (engine.encode_rendered(text) for text in format.ends)
        self._ends = turn_end_ids(engine, format.forms).union(ids[0] for ids in ends if len(ids) == 1)
        self.longest_text = self._capabilities.context * MAX_BYTES_PER_TOKEN
        """The longest text, in bytes, that is tokenized."""

    def parse(self, body: bytes, *, resumed: bool, variant: Mapping[str, Any] = NO_VARIANT) -> GenerateRequest:
        """Return the request in a body.

        resumed  whether another worker has begun the answer
        variant  the settings of the variant that the request names, see ``variant_of``

        Raises RequestError, and WireError WORKER_DIED for an answer that was begun and cannot go on in this worker.
        """
        variables = variant.get("template_kwargs", {})
        forced = self._forced_by(variant)
        request = parse_generate(body, self._defaults(variant), self._limits, variables, forced)
        if request.tool_choice == "required" and self._format.tools is None:
            raise _unsupported("tool_choice", "the format in which this model calls tools is not known", "tool_format")
        if request.reasoning_budget is not None:
            known = self._format.reasoning is not None
            if request.budget_if_reasoning and not (known and "reasoning_budget" in self._capabilities.offered):
                request = request.but(reasoning_budget=None)
            elif not known:
                raise _unsupported(
                    "reasoning_budget", "the markers of this model's reasoning are not known", "reasoning"
                )
        if resumed and (why := not_resumable(request)):
            raise WireError(ErrorCode.WORKER_DIED, f"the worker died, and an answer with {why} cannot go on in another")
        return request

    def check_verb(self, verb: str) -> None:
        """Raise RequestError for a message that this model does not answer. ``verb``: as ``Generate.verb``."""
        own = self._capabilities.verb
        if verb != own:
            makes = {
                "": "writes text: it makes no vectors and no scores",
                "embed": "makes vectors of texts: ask it with EMBED, which is /v1/embeddings over HTTP",
                "rerank": "scores documents: ask it with RERANK, which is /v1/rerank over HTTP",
            }
            raise RequestError(f"this model {makes[own]}", field="model", code=ErrorCode.UNSUPPORTED)

    def vectors_job(self, job_id: int, verb: str, body: bytes, sent: int) -> EmbedJob:
        """Return the engine's job for the body of an EMBED or a RERANK. Raises RequestError.

        sent  the number of events that another worker has sent
        """
        request = parse_vectors(verb, body)
        if isinstance(request, RerankRequest):
            documents = request.documents
            return EmbedJob(job_id, documents, request.query, request.instruction, None, request.truncate, sent)
        texts = request.texts or [memoryview(ids).cast("I").tolist() for ids in request.token_ids or ()]
        return EmbedJob(job_id, texts, None, request.prompt_name, request.dimensions, request.truncate, sent)

    def conversation(self, request: ChatFields) -> dict[str, Any] | None:
        """Return the chat template's input for a conversation, or None if the prompt is no conversation.

        Raises RequestError.
        """
        if request.messages is None:
            return None
        if self._engine.chat_template is None:
            raise RequestError("the model has no chat template: send prompt instead of messages", field="messages")
        if why := self._format.template_error:
            message = f"the model's chat template renders no conversation ({why}): send prompt instead of messages"
            raise RequestError(message, field="messages")
        texts = [text or "" for message in request.messages for text in (message.content, message.reasoning_content)]
        self._check_size("messages", texts)
        return request.for_template()

    def _defaults(self, variant: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**self._sampling, **variant["sampling"]} if "sampling" in variant else self._sampling

    def _forced_by(self, variant: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**self._forced, **variant["forced"]} if "forced" in variant else self._forced

    def _unset_max_tokens(self, variant: Mapping[str, Any]) -> int:
        """Return the most tokens of an answer if the request does not say it."""
        own = {**self._defaults(variant), **self._forced_by(variant)}
        bounds = (own.get("max_tokens"), self._limits.get("max_tokens"))
        return min((bound for bound in bounds if bound is not None), default=self._capabilities.context)

    def constraint(self, request: GenerateRequest) -> tuple[str, str] | None:
        """Return the constraint of a request as (field, text), or None: ``GenerateRequest.constraint``, or "tools".

        Calls that the model may make are constrained if the engine offers that, and the model's format is known. Calls
        that it must make always are, and so are calls instead of which the answer has a shape. Raises RequestError.
        """
        is_headed = self._format.has_head and request.with_format and request.constraint is not None
        is_headed = is_headed and not request.continue_final_message  # the prompt holds the header then
        family = self._format.family
        if family is None or not (is_headed or (request.tool_choice is not None and self._format.tools is not None)):
            return request.constraint
        if self._format.tools is None:  # only the head of the answer is written
            request = request.but(tools=None, allowed_tools=None, tool_choice=None)
        is_free = request.tool_choice == "auto" and request.constraint is None
        if is_free and "tools" not in self._capabilities.offered:
            return None
        return "tools", calls_text(request, family, self._format.parallel)

    def layout(self, request: GenerateRequest, rendered: str | None) -> Layout:
        """Return how the answer to a request is written. ``rendered`` is as for ``job``."""
        if rendered is None or not (request.with_format or request.reasoning_budget is not None or request.tool_choice):
            return PLAIN
        assert request.messages is not None
        continued = (request.messages[-1].content or "") if request.continue_final_message else None
        return self._format.layout(request, self._format.place(rendered, continued))

    def job(
        self,
        job_id: int,
        request: GenerateRequest,
        resumed_ids: tuple[int, ...],
        rendered: str | None = None,
        variant: Mapping[str, Any] = NO_VARIANT,
        events: int = 0,
    ) -> Job:
        """Return the engine's job for a request. Raises RequestError; its field "prompt" means the prompt in any form.

        rendered  the text that the chat template made of ``conversation``
        variant   as in ``parse``
        events    the number of events that another worker has sent

        If the request has a max_tokens of 0, the job draws one token, which is not for the client.
        """
        prompt_ids = self._encode(request, rendered)
        most = self._limits.get("prompt_tokens", len(prompt_ids))
        if len(prompt_ids) > most:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens: this model allows at most {most}", field="prompt"
            )
        max_tokens = request.max_tokens
        room = max(1, self._capabilities.context - len(prompt_ids))
        if max_tokens is None:
            most_tokens = self._unset_max_tokens(variant)
            if request.min_tokens > most_tokens < self._capabilities.context:
                remedy = "ask for fewer" if "max_tokens" in self._forced_by(variant) else "give max_tokens, too"
                raise RequestError(
                    f"min_tokens is {request.min_tokens}: more than the {most_tokens} of this model's own max_tokens: "
                    f"{remedy}",
                    field="min_tokens",
                )
            max_tokens = min(room, most_tokens)
        elif request.cut_to_context:
            max_tokens = min(room, max_tokens)
        return Job(
            job_id,
            tuple(prompt_ids),
            max_tokens or 1,
            request,
            request.stop,
            min_new_tokens=request.min_tokens,
            stop_on_loop=request.stop_on_loop,
            stop_token_ids=request.stop_token_ids
            if rendered is None or request.ignore_eos
            else (*request.stop_token_ids, *sorted(self._ends.difference(request.stop_token_ids))),
            banned_strings=request.banned_strings,
            token_healing=request.token_healing,
            top_logprobs=request.top_logprobs if request.logprobs else None,
            prompt_logprobs=_scoring(request, len(prompt_ids), resumed_ids, events),
            negative_ids=self._negative(request),
            constraint=self.constraint(request),
            lazy=request.tool_choice == "auto" and request.constraint is None,
            layout=self.layout(request, rendered),
            resumed_ids=resumed_ids,
        )

    @property
    def end_tokens(self) -> str:
        """The names of the tokens that end the answer to a conversation, for people."""
        ids = sorted(self._capabilities.end_ids.union(self._ends))
        names = (self._engine.token_bytes(token).decode(errors="replace") or f"id {token}" for token in ids)
        return " ".join(name for name in names if name.isprintable())

    def encode(self, prompt: str, *, add_special: bool = True) -> list[int]:
        """Return the token ids of a text. Raises RequestError for a text that is too long to fit.

        add_special  begin with BOS where the model expects one
        """
        self._check_size("prompt", [prompt])
        return self._engine.encode(prompt) if add_special else self._engine.encode_rendered(prompt)

    def _encode(self, request: GenerateRequest, rendered: str | None) -> list[int]:
        if request.token_ids is not None:
            return list(memoryview(request.token_ids).cast("I"))
        if request.prompt is not None:
            return self.encode(request.prompt)
        assert rendered is not None, "a conversation is rendered first"
        return self._engine.encode_rendered(rendered)

    def _negative(self, request: GenerateRequest) -> tuple[int, ...] | None:
        """Return the token ids of the negative prompt for classifier-free guidance. Without one, encode an empty
        text."""
        if request.cfg_scale == 1 or "cfg_scale" not in self._capabilities.offered:
            return None
        text = request.negative_prompt or ""
        self._check_size("negative_prompt", [text])
        try:
            ids = self._engine.encode(text)
        except RequestError as e:
            raise RequestError(f"negative_prompt: {e.message}", field="negative_prompt", code=e.code) from None
        if not ids:
            raise RequestError(
                "negative_prompt: this model has no beginning-of-sequence token to stand for none: give a text",
                field="negative_prompt",
            )
        return tuple(ids)

    def _check_size(self, field: str, texts: Sequence[str]) -> None:
        size = sum(len(text.encode(errors="surrogatepass")) for text in texts)
        if size > self.longest_text:
            raise RequestError(
                f"the {field.replace('_', ' ')} {'have' if field == 'messages' else 'has'} {size} bytes: at most "
                f"{self.longest_text} can fit the context of {self._capabilities.context} tokens",
                field=field,
                code=ErrorCode.CONTEXT_OVERFLOW,
            )


def _scoring(request: GenerateRequest, tokens: int, resumed_ids: Sequence[int], events: int) -> PromptScoring | None:
    """Return which log-probabilities of a prompt of ``tokens`` the client still lacks. Raises RequestError."""
    top, first = request.prompt_logprobs, request.prompt_logprobs_from
    if top is None:
        return None
    if first > max(1, tokens - 1):
        raise RequestError(
            f"prompt_logprobs_from is {first}: the prompt has {tokens} tokens, counted from 0",
            field="prompt_logprobs_from",
        )
    if (tokens - first) * (top + 1) > MOST_PROMPT_LOGPROBS:
        raise RequestError(
            f"prompt_logprobs is {top}: {tokens - first} tokens of the prompt have {(tokens - first) * (top + 1)} "
            f"log-probabilities, at most {MOST_PROMPT_LOGPROBS} are reported: ask for fewer, or give a higher "
            "prompt_logprobs_from",
            field="prompt_logprobs",
        )
    if events:  # the first events are pieces of the prompt: see PromptLogprobs
        first = ((first - 1) // PIECE + events) * PIECE + 1
        if resumed_ids or first >= tokens:
            return None
    return PromptScoring(top, first)


def variant_of(carry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the variant that a request names, from the ``carry`` of its job. Empty without one."""
    packed = carry.get("defaults")
    return NO_VARIANT if packed is None else unpack_body(packed)


def _unsupported(field: str, why: str, key: str) -> RequestError:
    return RequestError(f"{field}: {why}: set {key} in models.yaml", field=field, code=ErrorCode.UNSUPPORTED)


def prompt_field(request: GenerateRequest) -> str:
    """Return the name of the field in which a request gave its prompt."""
    return next(name for name in ("prompt", "messages", "token_ids") if getattr(request, name) is not None)


def not_resumable(request: GenerateRequest) -> str | None:
    """Return the name of an option that keeps an answer from going on in another worker; None if there is none.

    The state of mirostat depends on probabilities that are lost. An answer with banned strings, or with a healed first
    token, does not follow from its token ids alone. Guidance keeps two sequences in step.
    """
    if request.mirostat_mode:
        return "mirostat"
    if request.banned_strings:
        return "banned_strings"
    if request.token_healing:
        return "token_healing"
    if request.cfg_scale != 1:
        return "cfg_scale"
    return None


def check_defaults(sampling: Mapping[str, Any], forced: Mapping[str, Any], offered: frozenset[str]) -> None:
    """Raise LoadError for a sampling default or a forced value of models.yaml that the engine does not offer."""
    for key, options in (("sampling", sampling), ("forced", forced)):
        if name := not_offered(options, offered):
            message = f"{key}.{name} is not offered by this model's engine: remove it"
            raise LoadError(message, key=f"{key}.{name}" if name in options else f"{key}.preset")


def not_offered(sampling: Mapping[str, Any], offered: frozenset[str]) -> str | None:
    """Return the first sampling default that an engine does not offer, or None. ``offered`` is as in Capabilities."""
    optional = offered | {"preset", "max_tokens", "stop"}
    for name, value in {**PRESETS[sampling.get("preset", "none")], **sampling}.items():
        neutral = getattr(GenerateRequest, name)
        if name not in optional and (tuple(value) if isinstance(value, list) else value) != neutral:
            return name
    return None


def turn_end_ids(engine: Engine, forms: Sequence[TemplateForm]) -> frozenset[int]:
    """Return the special tokens that a chat template writes first behind the assistant's words.

    Many models that were trained further have no generation_config.json, and name the end of text only. Without the
    token that ends a turn, their answers go on up to their limit. Only special tokens count: text with which a template
    begins the user's next turn may stand in an answer. Ids that the engine knows itself are left out.
    """
    capabilities = engine.capabilities
    if "stop_token_ids" not in capabilities.offered:
        return frozenset()
    found: set[int] = set()
    for text in {end for form in forms for end in form.turn_ends}:
        try:
            ids = engine.encode_rendered(text[:_LONGEST_END])
        except RequestError:
            continue
        first = next((token for token in ids if engine.token_bytes(token).strip()), None)
        if first is not None and not engine.decode([first]):
            found.add(first)
    return frozenset(found - capabilities.end_ids)
