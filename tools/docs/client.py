"""Make the page of the Python client from the docstrings and signatures of the names that ``modelctl`` exports."""

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from inspect import Parameter
from typing import Any

import modelctl
from tools.docs.docstrings import render
from tools.docs.markdown import page, table, text

WIDTH = 100
"""Characters of a signature on one line. A longer one has a line for each parameter."""
SECTIONS = {
    "Clients": ("Client", "AsyncClient"),
    "Answers as they come": ("Stream", "AsyncStream", "Choices", "AsyncChoices"),
    "Parts of an answer": ("Delta", "Completion", "TokenLogprob", "Progress", "Embeddings"),
    "Errors": ("WireError", "RequestError", "ConnectionLost", "ErrorCode"),
    "Keys": ("ClientKey",),
}
"""The public names, in the order in which a reader meets them."""
MADE_BY_PROGRAMS = ("Client", "AsyncClient")
"""Classes whose constructor a program calls. The client makes objects of the other classes."""
TWINS = {"AsyncClient": "Client", "AsyncStream": "Stream", "AsyncChoices": "Choices"}
"""The classes for asyncio, and those for blocking code. A member that both have stands on the page once."""
VERB = re.compile(r'verb "(\w+)"')
"""What the docstring of a method says that only sends a verb. The wire protocol describes the verb."""
INTRODUCTION = """\
```python
from modelctl import Client

with Client() as client:  # finds the running supervisor
    messages = [{"role": "user", "content": "Tell me a story about Mia the fox."}]
    stream = client.generate("stories", messages=messages, temperature=0, max_tokens=200)
    for delta in stream:  # leaving the loop early cancels the request
        print(delta.text, end="", flush=True)
    print("\\n", stream.finish_reason, stream.usage)
```

`AsyncClient` has the same methods for asyncio:

```python
import asyncio

from modelctl import AsyncClient


async def main():
    async with AsyncClient() as client:
        async for delta in client.generate("letters", "sort: d b a c ->", temperature=0):
            print(delta.text, end="")


asyncio.run(main())
```

Everything on this page is imported from `modelctl`. Other modules of the distribution are internal. See also
[error codes](wire-protocol.md#errors), and for clients in other languages the [wire protocol](wire-protocol.md).

The keywords of `generate` are the [options of a request](http-api.md#options-of-a-request). In Python, `token_ids` may
be numbers or bytes, `json_schema` a dict or a text, `stop` one text or several, and the keys of `logit_bias` numbers.
None stands for an option that is not given."""


def client_page() -> str:
    """Return the page."""
    if sorted(name for names in SECTIONS.values() for name in names) != sorted({*modelctl.__all__} - {"__version__"}):
        raise ValueError(f"SECTIONS does not name what modelctl exports: {', '.join(modelctl.__all__)}")
    parts = [INTRODUCTION]
    for title, names in SECTIONS.items():
        parts.append(f"## {title}")
        for name in names:
            parts += _class_part(name, getattr(modelctl, name))
    return page("Python client", "the docstrings of the classes in protocol/", *parts)


def _class_part(name: str, kind: type) -> Iterator[str]:
    yield f"### {name}"
    twin = getattr(modelctl, TWINS[name]) if name in TWINS else None
    if is_dataclass(kind) or (name in MADE_BY_PROGRAMS and twin is None):
        yield _code(_constructor(name, kind))
    yield render(_docstring(kind, name))
    if shown := [base.__name__ for base in kind.__mro__[1:] if base in _public()]:
        yield f"Base class: {', '.join(f'[{base}](#{base.lower()})' for base in shown)}."
    if issubclass(kind, Enum):
        yield "The members are the names in the [table of errors](wire-protocol.md#errors), in upper case."
        return
    members = dict(_members(kind))
    if twin is not None:
        yield _as_the_twin(name, members, dict(_members(twin)))
        members = {name: member for name, member in members.items() if name not in dict(_members(twin))}
    short, verbs = [], []
    for attribute, member in members.items():
        docstring = _docstring(member, f"{name}.{attribute}")
        shown_as = _property(attribute, member) if isinstance(member, property) else _signature(inspect.unwrap(member))
        if verb := VERB.search(docstring):
            meaning = docstring.partition(": the ")[0]
            link = f"[`{verb[1]}`](wire-protocol.md#verb-{verb[1]})"
            verbs.append((f"`{_one_line(shown_as).removesuffix(' -> dict[str, Any]')}`", f"{text(meaning)}: {link}"))
        elif "\n|" in f"\n{(rendered := render(docstring))}":
            yield f"#### `{name}.{attribute}()`"
            yield _code(shown_as)
            yield rendered
        else:
            short.append((f"`{_one_line(shown_as)}`", rendered))
    if verbs:
        yield (
            "These methods send one [verb of CALL](wire-protocol.md#verbs-of-call) and return the map of its result."
            " Locally the verbs of the socket `admin` take a client with `admin=True`."
        )
        yield table(("method", "meaning"), verbs)
    if short:
        yield table(("member", "meaning"), short)


def _as_the_twin(name: str, members: dict[str, Any], of_twin: dict[str, Any]) -> str:
    """Return a sentence for the members that a class for asyncio has as its twin has them. They must take the same."""
    awaited: list[str] = []
    others: list[str] = []
    for attribute in of_twin:
        ours, theirs = members[attribute], of_twin[attribute]
        if isinstance(ours, property):
            continue
        if inspect.signature(ours).parameters.keys() != inspect.signature(theirs).parameters.keys():
            raise ValueError(f"{name}.{attribute} takes other parameters than that of {TWINS[name]}: describe it")
        (awaited if inspect.iscoroutinefunction(ours) else others).append(f"`{attribute}`")
    said = f"It has the members of [{TWINS[name]}](#{TWINS[name].lower()})."
    said += f" Await {', '.join(awaited)}." if awaited else ""
    return said + (f" Do not await {', '.join(others)}." if others else "")


def _property(attribute: str, member: property) -> str:
    return f"{attribute}: {ast.unparse(_definition(member.fget).returns)}"


def _one_line(signature: str) -> str:
    shown = re.sub(r"^(async )?def ", "", signature.replace(",\n)", ")")).replace("(\n    ", "(")
    return re.sub(r"\s+", " ", shown)


def _docstring(owner: Any, path: str) -> str:
    docstring = inspect.getdoc(owner)
    if not docstring:
        raise ValueError(f"{path} is public and has no docstring: write one")
    return docstring


def _members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class, in source order, with those of its internal base classes."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        internal = base.__module__.partition(".")[0] == kind.__module__.partition(".")[0] and base not in _public()
        if base is kind or internal:
            found |= {name: value for name, value in vars(base).items() if not name.startswith("_")}
    for name, value in found.items():
        if isinstance(value, property | staticmethod) or inspect.isfunction(value):
            yield name, value


def _constructor(name: str, kind: type) -> str:
    """Return the signature with which a program makes an object of a class."""
    if is_dataclass(kind):
        nodes = [node for node in _definition(kind).body if isinstance(node, ast.AnnAssign)]
        types = {ast.unparse(node.target): ast.unparse(node.annotation).replace("'", "") for node in nodes}
        parts = [
            f"{field.name}: {types[field.name]}" + ("" if field.default is MISSING else f" = {field.default!r}")
            for field in fields(kind)
        ]
        return _fitted(f"{name}(", parts, ")")
    return _signature(kind.__init__).replace("def __init__(", f"{name}(").replace(") -> None", ")")  # type: ignore[misc]


def _signature(function: Any) -> str:
    """Return a function's signature: types as they are written in its source, and the values of the defaults."""
    node = _definition(function)
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    written = [*node.args.posonlyargs, *node.args.args, node.args.vararg, *node.args.kwonlyargs, node.args.kwarg]
    types = {each.arg: ast.unparse(each.annotation) for each in written if each is not None and each.annotation}
    parts, kind = [], None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        if kind is Parameter.POSITIONAL_ONLY and parameter.kind is not kind:
            parts.append("/")
        if parameter.kind is Parameter.KEYWORD_ONLY and kind not in (Parameter.KEYWORD_ONLY, Parameter.VAR_POSITIONAL):
            parts.append("*")
        stars = _STARS.get(parameter.kind, "")
        default = "" if parameter.default is Parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{stars}{parameter.name}: {types[parameter.name]}{default}")
        kind = parameter.kind
    word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returned = f" -> {ast.unparse(node.returns).strip(chr(39))}" if node.returns else ""
    return _fitted(f"{word} {node.name}(", parts, f"){returned}")


_STARS: dict[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


def _fitted(before: str, parts: list[str], after: str) -> str:
    line = before + ", ".join(parts) + after
    if len(line) <= WIDTH:
        return line
    return "\n".join([before, *(f"    {part}," for part in parts), after])


def _public() -> list[Any]:
    return [getattr(modelctl, name) for names in SECTIONS.values() for name in names]


def _definition(owner: Any) -> Any:
    return ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]


def _code(source: str) -> str:
    return f"```python\n{source}\n```"
