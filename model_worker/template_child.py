"""Render chat templates, in a process that does nothing else and may be killed at any moment.

    python -P template_child.py MAILBOX

MAILBOX  descriptor of a file in memory, which holds a request and then its answer
stdin    the link to the worker (``helper_link``): 8 bytes are the length of the content of the mailbox; the first 8
         bytes sent say "ready"

A template is a program from a model's directory, and clients choose its input. It runs in jinja's sandbox, with limits
on time and memory, where neither can hurt the worker. ``rendering.Renderer`` starts this file as a program and gives it
one conversation at a time. It imports the standard library, msgpack, jinja2 and setproctitle.
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
import msgpack

from model_worker.rendering import TemplateForm, UnfitError, adapt
from model_worker.template_probes import probe
from protocol.process.helper_link import become_helper, serve

MEMORY = 512 << 20
"""Bytes of address space of this process."""
NICE = 5
"""The nice value of this process. On a shared processor, a template that loops gets a quarter of the worker's time."""
_SHOWN = 300
"""The most characters of a template's message that a client may see."""
_QUOTE = 8
"""A message quotes a conversation if it repeats this many characters of it in a row."""
_CUT = "CUT-HERE-41c7d3a9 "
"""A mark behind the message that is to be continued. Its blank shows whether the template trims messages."""
_LONGEST_PROBE = 1 << 20
"""Characters of a rendered probe. A template that writes more for some words takes no conversation."""


class _Refused(Exception):
    """Raised by ``raise_exception()`` of a chat template."""


class _Generation(jinja2.ext.Extension):
    """The tag ``{% generation %}``, with which templates mark the assistant's words for training. Only its content is
    rendered."""

    tags = {"generation"}  # noqa: RUF012 - as jinja has it

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        return jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


def _refuse(message: object) -> NoReturn:
    raise _Refused(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON. Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def environment() -> jinja2.Environment:
    """Return a jinja environment with the filters and functions of transformers, for which templates are written."""
    made = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made


@lru_cache(2)
def _compiled(source: str) -> jinja2.Template:
    return environment().from_string(source)


def render(request: dict[str, Any]) -> dict[str, Any]:
    """Render one conversation.

    Return {text: bytes}, or {size: bytes} if the text is beyond the limit, or {error: a sentence for the client}. The
    sentence quotes nothing of the conversation.

    request  template, special_tokens, messages, tools, variables, add_generation_prompt, continue_final_message, form
             (what the template can take), and limit: the largest size of the text in bytes
    """
    messages, tools, limit = request["messages"], request["tools"], request["limit"]
    try:
        if request["continue_final_message"]:
            if not isinstance(messages[-1].get("content"), str):
                return {"error": "continue_final_message: the last message has no content to continue"}
            messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + _CUT}]
        if request["form"] is not None:
            messages, tools = adapt(messages, tools, TemplateForm.from_wire(request["form"]))
        pieces: list[str] = []
        size = 0
        for piece in _compiled(request["template"]).generate(
            messages=messages,
            tools=tools,
            add_generation_prompt=request["add_generation_prompt"],
            **request["special_tokens"],
            **request["variables"],
        ):
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                return {"size": size}
        text = "".join(pieces)
        if request["continue_final_message"]:
            at = text.rfind(_CUT.strip())
            if at < 0:
                return {"error": "continue_final_message: the model's chat template leaves the last message out"}
            text = text[:at] if text.startswith(_CUT, at) else text[:at].rstrip()
        encoded = text.encode()
        return {"text": encoded} if len(encoded) <= limit else {"size": len(encoded)}
    except UnfitError as e:
        return {"error": str(e)}
    except _Refused as e:
        return {"error": f"the model's chat template refuses: {_quotes_nothing(str(e), request)}"}
    except jinja2.TemplateSyntaxError as e:
        return {"error": f"the model's chat template cannot be read: line {e.lineno}: {(e.message or '')[:_SHOWN]}"}
    except MemoryError:
        return {"error": "the model's chat template needs more memory than it is given", "last": True}
    except UnicodeEncodeError:
        return {"error": "the model's chat template renders what is not valid Unicode"}
    except Exception as e:  # a template is a program and may raise anything
        return {"error": f"the model's chat template fails: {type(e).__name__}: {_quotes_nothing(str(e), request)}"}


def probe_forms(request: dict[str, Any]) -> dict[str, Any]:
    """Return {forms}: what each of the templates can take, in the order in which they are given.

    request  templates, special_tokens
    """
    forms: list[dict[str, Any]] = []
    for source in request["templates"]:
        why = ""

        def draw(messages: Any, tools: Any = None, end: bool = True, source: str = source) -> str | None:
            nonlocal why
            pieces: list[str] = []
            size = 0
            try:
                for piece in _compiled(source).generate(
                    messages=messages, tools=tools, add_generation_prompt=end, **request["special_tokens"]
                ):
                    pieces.append(piece)
                    size += len(piece)
                    if size > _LONGEST_PROBE:
                        raise ValueError("it writes more than 1 MiB for a few words")
            except MemoryError:
                raise
            except Exception as e:  # a template is a program and may raise anything
                why = why or f"{type(e).__name__}: {e}"[:_SHOWN]
                return None
            text = "".join(pieces)
            if not _is_text(text):
                why = why or "it renders what is not valid Unicode"
                return None
            return text

        form = probe(draw).to_wire()
        if form["error"] and why:
            form["error"] = why
        forms.append(form)
    return {"forms": forms}


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate, which a template may write as '\\ud800'
        return False
    return True


def _quotes_nothing(message: str, request: dict[str, Any]) -> str:
    """Return the beginning of a template's message without its quotes of the conversation, since errors are logged."""
    said = list(_texts(request["messages"]))
    everything = "\0".join([*said, *_texts([request["tools"], request["variables"]])])
    words = {text for text in said if 2 < len(text) < _QUOTE}
    kept: list[str] = []
    at = 0
    while at < min(len(message), _SHOWN):
        quoted = next((n for n in range(_QUOTE - 1, 2, -1) if message[at : at + n] in words), 0)
        run = message[at : at + _QUOTE]
        if len(run) == _QUOTE and run in everything:
            quoted = _QUOTE
            while at + quoted < len(message) and message[at + quoted - _QUOTE + 1 : at + quoted + 1] in everything:
                quoted += 1
        kept.append("…" if quoted else message[at])
        at += quoted or 1
    return "".join(kept)


def _texts(value: Any) -> Iterator[str]:
    """Yield every string of the conversation except roles, which the message of a refusal has to name."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key != "role":
                yield from _texts(inner)
    elif isinstance(value, Sequence) and not isinstance(value, bytes):
        for inner in value:
            yield from _texts(inner)


def main(mailbox: int) -> None:
    # The supervisor asks for a worker's stacks by SIGUSR1 to its process group. SIGPROF ends a rendering that is too
    # slow.
    link = become_helper("template child", ignored=(signal.SIGUSR1,))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump holds prompts
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    _compiled("{{ strftime_now('%Y') }}").render()  # so that these imports are not made during the first rendering
    os.nice(NICE)
    link.send(bytes(8))

    def answer(head: bytes) -> None:
        request = msgpack.unpackb(os.pread(mailbox, int.from_bytes(head, "little"), 0), strict_map_key=False)
        # The limit is on this process's own processor time: on a busy machine a good template takes long by the clock.
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        answer = probe_forms(request) if "templates" in request else render(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        # The message of an error may hold lone surrogates, as `raise_exception('\\ud800')` does.
        packed = msgpack.packb(answer, unicode_errors="backslashreplace")
        os.pwrite(mailbox, packed, 0)
        link.send(len(packed).to_bytes(8, "little"))
        if "last" in answer:
            sys.exit()

    serve(link, answer)


if __name__ == "__main__":
    main(int(sys.argv[1]))
