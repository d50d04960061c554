"""Real chat templates render every conversation that agents send, as transformers does, and without a lost word.

``make test-templates`` runs this file. ``make test`` does not, because it downloads two packages of PyPI that hold
templates: the source package of llama-cpp-python, and unsloth. Nothing of them is installed or imported.

For each template and each conversation one of three holds:
(a) transformers renders the conversation, and every word of it stands in the prompt: our prompt equals that one.
(b) Otherwise our prompt equals transformers' prompt of the adapted conversation, and has every word.
(c) Otherwise the request is refused, and the error names the reason.

The table tests/real_templates.md is made from the result: ``TEMPLATES_TABLE=write`` writes it.
"""

import ast
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from gateway.http.answers import Notes
from gateway.openai.requests import read_messages
from model_worker.engine import ChatTemplate
from model_worker.intake import GENERAL, ModelTraits, reads_back
from model_worker.rendering import Renderer, UnfitError, adapt
from protocol.chat import ChatFields
from protocol.errors import RequestError, WireError
from protocol.values import read
from tests.chat import format_of
from tests.serving import ROOT, wait_until

PACKAGES: Final = """\
llama-cpp-python==0.3.36 --hash=sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
unsloth==2026.10.9 --hash=sha256:feb40b99bc4f8c543a36cbd0fe6e1410d6e4ac16bd4d0c731f607adce3d63bb0
"""
CACHE: Final = ROOT / ".venv" / "templates"
PAGE: Final = ROOT / "tests" / "real_templates.md"
TOKENS: Final = {"bos_token": "<s>", "eos_token": "</s>"}
Message = dict[str, Any]


def sources() -> dict[str, str]:
    """Return the text of each template by its name. The first call downloads 105 MB."""
    kept = CACHE / "templates.json"
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        (CACHE / "packages.txt").write_text(PACKAGES)
        print("the chat templates are downloaded: 105 MB", flush=True)
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes", "--dest", str(CACHE),
             "--no-binary", "llama-cpp-python", "-r", str(CACHE / "packages.txt")],
            check=True,
        )  # fmt: skip
        found = dict(sorted([*_of_llama_cpp(), *_of_unsloth()]))
        first: dict[str, str] = {}
        for name, text in found.items():
            first.setdefault(text, name)
        kept.write_text(json.dumps({name: text for text, name in first.items()}))
    loaded: dict[str, str] = json.loads(kept.read_text())
    return loaded


def _of_llama_cpp() -> Iterator[tuple[str, str]]:
    with tarfile.open(next(CACHE.glob("llama_cpp_python-*.tar.gz"))) as package:
        for member in package:
            path = Path(member.name)
            if path.suffix == ".jinja" and path.parts[1:-1] == ("vendor", "llama.cpp", "models", "templates"):
                file = package.extractfile(member)
                assert file is not None
                yield path.stem, io.TextIOWrapper(file, "utf-8").read()


def _of_unsloth() -> Iterator[tuple[str, str]]:
    """Yield the templates in the texts of Python files. They are read, not run."""
    with zipfile.ZipFile(next(CACHE.glob("unsloth-*.whl"))) as package:
        for name in package.namelist():
            if name.endswith(".jinja"):
                yield f"unsloth {Path(name).stem}", package.read(name).decode()
            elif name.endswith(".py") and "templ" in name:
                for node in ast.parse(package.read(name)).body:
                    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                        try:
                            text = ast.literal_eval(node.value)
                        except ValueError:
                            continue
                        if isinstance(text, str) and "{%" in text and "messages" in text:
                            yield f"unsloth {node.targets[0].id.removesuffix('_template')}", text


# the conversations

WEATHER: Final = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather of a place.",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string", "description": "Its name."}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}
SEARCH: Final = {
    "type": "function",
    "function": {
        "name": "search_files",
        "description": "Search in files.",
        "parameters": {
            "type": "object",
            "properties": {"words": {"type": "string", "description": "What to search."}},
            "required": ["words"],
        },
    },
}
TOOLS: Final = [WEATHER, SEARCH]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _said(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def _system(text: str, role: str = "system") -> Message:
    return {"role": role, "content": text}


def _call(id: str, name: str, arguments: str) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(id: str, text: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "content": text}


ID: Final = "call_h4Xk29dLq0ZsVb71"
OTHER: Final = "toolu_01A09q90qw90lq917835lq9"
OSLO: Final = _call(ID, "get_weather", '{"place": "Oslo", "days": 3}')
FILES: Final = _call(OTHER, "search_files", '{"words": "fjord boats"}')
ASK: Final = _user("How is the weather in Norway?")
DRY: Final = _result(ID, "Dry and cold.")
FOUND: Final = _result(OTHER, "Two boats found.")

CONVERSATIONS: Final[dict[str, tuple[list[Message], list[Any] | None]]] = {
    "one question": ([ASK], None),
    "system message": ([_system("Answer briefly."), ASK], None),
    "several turns": ([_system("Answer briefly."), ASK, _said("It is dry."), _user("And tomorrow?")], None),
    "tools": ([_system("Answer briefly."), ASK], TOOLS),
    "null content": ([ASK, _said(None, tool_calls=[OSLO]), DRY], TOOLS),
    "after a result": ([ASK, _said(None, tool_calls=[OSLO]), DRY, _said("It is dry."), _user("And then?")], TOOLS),
    "empty text": ([ASK, _said("", tool_calls=[OSLO]), DRY], TOOLS),
    "text beside a call": ([ASK, _said("I look it up.", tool_calls=[OSLO]), DRY], TOOLS),
    "cut arguments": ([ASK, _said(None, tool_calls=[_call(ID, "get_weather", '{"place": "Os')]), DRY], TOOLS),
    "arguments encoded twice": (
        [ASK, _said(None, tool_calls=[_call(ID, "get_weather", json.dumps('{"place": "Oslo"}'))]), DRY], TOOLS),
    "arguments are a list": ([ASK, _said(None, tool_calls=[_call(ID, "get_weather", '["Oslo", 3]')]), DRY], TOOLS),
    "no arguments": ([ASK, _said(None, tool_calls=[_call(ID, "get_weather", "{}")]), DRY], TOOLS),
    "nested arguments": (
        [ASK, _said(None, tool_calls=[_call(ID, "get_weather", '{"place": "Oslo", "at": {"hour": 7}}')]), DRY], TOOLS),
    "foreign ids": ([ASK, _said(None, tool_calls=[FILES]), FOUND], TOOLS),
    "parallel calls": ([ASK, _said(None, tool_calls=[OSLO, FILES]), DRY, FOUND, _said("Dry, two boats."),
                        _user("Thank you.")], TOOLS),
    "two calls in turn": ([ASK, _said(None, tool_calls=[OSLO]), DRY, _said(None, tool_calls=[FILES]), FOUND], TOOLS),
    "reasoning": ([ASK, _said(None, reasoning_content="The user means Oslo.", tool_calls=[OSLO]), DRY], TOOLS),
    "reasoning and a text": (
        [ASK, _said("I look it up.", reasoning_content="The user means Oslo.", tool_calls=[OSLO]), DRY], TOOLS),
    "empty answer": ([ASK, _said(""), _user("Are you there?")], None),
    "no calls in a list": ([ASK, _said("It is dry.", tool_calls=[]), _user("And tomorrow?")], TOOLS),
    "developer": ([_system("Answer briefly.", "developer"), ASK], None),
    "two system messages": ([_system("Answer briefly."), _system("Use metric units."), ASK], None),
    "system in the middle": ([_system("Answer briefly."), ASK, _said("It is dry."), _system("Use metric units."),
                              _user("And tomorrow?")], None),
    "system behind a result": ([ASK, _said(None, tool_calls=[OSLO]), DRY, _system("Use metric units.")], TOOLS),
    "user behind a result": ([ASK, _said(None, tool_calls=[OSLO]), DRY, _user("Hurry up.")], TOOLS),
    "two users": ([ASK, _user("Hurry up.")], None),
    "list content": ([{"role": "user", "content": [{"type": "text", "text": "How is it "},
                                                   {"type": "text", "text": "in Norway?"}]}], None),
}  # fmt: skip


# what stands in a prompt


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part["text"] for part in content)
    return (content or "").strip()


def _spellings(text: str) -> tuple[str, ...]:
    return text, json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]


def _behind(prompt: str, text: str, at: int) -> int:
    """Return the place behind a text in the prompt; -1 if it does not stand there."""
    found = [(place, len(one)) for one in _spellings(text) if (place := prompt.find(one, at)) >= 0]
    return sum(min(found)) if found else -1


def _arguments_stand(prompt: str, given: str, at: int, *, is_ours: bool) -> bool:
    """Return whether arguments stand in a prompt. Ours may hold a text that is no JSON object within JSON."""
    part = prompt[at:]
    if given in part.replace(json.dumps(given), ""):  # JSON text in JSON text is another argument
        return True
    try:
        value = json.loads(given)
        value = json.loads(value) if isinstance(value, str) and is_ours else value
    except ValueError:
        value = None
    if not isinstance(value, dict):
        return is_ours and any(one in part for one in _spellings(given))
    if json.dumps(given) in part:
        return is_ours
    return all(text in part for text in _leaves(value))


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _leaves(inner)
    else:
        yield value if isinstance(value, str) else json.dumps(value)


def missing(
    prompt: str, messages: list[Message], tools: list[Any] | None, *, is_ours: bool, reasons: bool = False
) -> str:
    """Return what of a conversation does not stand in a prompt, or not in its order; "" if nothing is missing.

    reasons  whether the template shows the reasoning of a turn that has not ended
    """
    for tool in tools or ():
        function = tool["function"]
        for text in (function["name"], function["description"], *function["parameters"]["properties"]):
            if text not in prompt:
                return f"tool: {text}"
    first = next(_text(m["content"]) for m in messages if m["role"] == "user")
    begin = max(0, prompt.rfind(first))
    texts = calls = results = begin
    leading = True
    for message in messages:
        text, role = _text(message["content"]), message["role"]
        leading = leading and role in ("system", "developer")
        if leading:  # some templates put it into the user's last turn
            if _behind(prompt, text, 0) < 0:
                return text
        elif role == "tool":
            if (results := _behind(prompt, text, results)) < 0:
                return text
        elif text and (texts := _behind(prompt, text, texts)) < 0:
            return text
        if reasons and message.get("reasoning_content", "") not in prompt:
            return str(message["reasoning_content"])
        for call in message.get("tool_calls") or ():
            function = call["function"]
            if (calls := _behind(prompt, function["name"], calls)) < 0:
                return str(function["name"])
            if not _arguments_stand(prompt, function["arguments"], calls, is_ours=is_ours):
                return str(function["arguments"])
    return ""


# the comparison


@dataclass
class Row:
    """What was found about one template."""

    name: str
    format: ModelTraits
    outcomes: dict[str, str] = field(default_factory=dict)
    """(a), (b) or (c) by the name of the conversation."""
    reasons: dict[str, str] = field(default_factory=dict)
    """The errors of (c)."""
    wrong: list[str] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        return list(self.outcomes.values()).count(outcome)


def drawn_by(source: str) -> Callable[[list[Message], list[Any] | None], str | None]:
    """Return a function that renders with transformers. It returns None if transformers fails."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), **TOKENS)

    def draw(messages: list[Message], tools: list[Any] | None) -> str | None:
        try:
            text: str = tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=source, add_generation_prompt=True, tokenize=False
            )
        except Exception:  # a template may raise anything
            return None
        return text

    return draw


def compared(name: str, source: str) -> Row:
    """Render every conversation with one template, and say which of the three holds."""
    template = ChatTemplate(source, TOKENS)
    row = Row(name, format_of(template))
    draw = drawn_by(source)
    renderer = Renderer(template, 1 << 20, row.format.forms)
    try:
        for title, (messages, tools) in CONVERSATIONS.items():
            fields = {"messages": read_messages(messages, Notes()), "tools": tools}
            given = read(ChatFields, fields).for_template()
            renderer.ask(1, 1, given)
            ((_, prompt),) = wait_until(renderer.collect, 60, "a rendered conversation")
            theirs = draw(messages, tools)
            form = row.format.forms[bool(tools)]
            reasons = bool(form.reasoning)
            whole = theirs is not None and not missing(theirs, messages, tools, is_ours=False, reasons=reasons)
            if any(message.get("tool_calls") == [] for message in messages):  # no calls are no list of calls
                bare = [{key: value for key, value in message.items() if value != []} for message in messages]
                whole = whole and theirs == draw(bare, tools)
            if prompt == theirs and whole:
                row.outcomes[title] = "a"
            elif isinstance(prompt, WireError):
                row.outcomes[title], row.reasons[title] = "c", prompt.message
                if not isinstance(prompt, RequestError) or prompt.field != "messages" or whole:
                    row.wrong.append(f"{title}: {prompt.message}")
            else:
                row.outcomes[title] = "b"
                try:
                    adapted = draw(*adapt(given["messages"], given["tools"], form))
                except UnfitError as e:
                    adapted = str(e)
                lost = missing(prompt, messages, tools, is_ours=True)
                if whole or prompt != adapted or lost:
                    why = (
                        "transformers renders it whole" if whole else f"lost: {lost}" if lost else "not the adapted one"
                    )
                    row.wrong.append(f"{title}: {why}\n--- ours\n{prompt}\n--- theirs\n{theirs}")
    finally:
        renderer.close()
    return row


ROWS: Final[dict[str, Row]] = {}


@pytest.mark.parametrize("name", sources())
def test_a_real_template(name: str) -> None:
    row = ROWS[name] = compared(name, sources()[name])
    assert not row.wrong, "\n\n".join(row.wrong)
    if row.format.tried and row.format.tools not in (None, GENERAL):
        assert reads_back(str(row.format.tools), row.format.forms[-1].call, row.format.reasoning)


def test_the_table_in_the_repository_is_this_result() -> None:
    if len(ROWS) < len(sources()):
        pytest.skip("only some templates were compared")
    text = table(list(ROWS.values()))
    if os.environ.get("TEMPLATES_TABLE") == "write":
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "run it again with TEMPLATES_TABLE=write, and commit the page"


def table(rows: list[Row]) -> str:
    """Return the table."""
    lines = [
        "| template | format of calls | calls an answer | reasoning | what is changed | (a) | (b) | (c) |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        format = row.format
        name = "none" if format.tools is None else f"`{format.tools}`" + ("" if format.tried else " (not tried)")
        several = "" if format.tools is None else "several" if format.parallel else "one"
        markers = f"`{format.reasoning[0]}`" if format.reasoning else ""
        counts = [str(row.count(one)) for one in "abc"]
        cells = [row.name, name, several, markers, format.template_changes, *counts]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    totals = [str(sum(row.count(one) for row in rows)) for one in "abc"]
    return "\n".join([*lines, "| all | | | | | " + " | ".join(totals) + " |"]) + "\n"
