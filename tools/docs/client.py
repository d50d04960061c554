"""Make the page of the Python client from the docstrings and signatures of the names that ``modelctl`` exports."""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from inspect import Parameter
from typing import Any, Unpack, get_args, get_origin

import modelctl
from tools.docs.docstrings import render
from tools.docs.markdown import page

WIDTH = 100
"""Characters of a signature on one line. A longer one has a line for each parameter."""
SECTIONS = {
    "Clients": ("Client", "AsyncClient"),
    "Answers as they come": ("Stream", "AsyncStream", "Choices", "AsyncChoices"),
    "Parts of an answer": ("Delta", "Completion", "TokenLogprob", "Progress"),
    "Errors": ("WireError", "RequestError", "ConnectionLost", "ErrorCode"),
    "Keys": ("ClientKey",),
}
"""The public names, in the order in which a reader meets them."""
MADE_BY_PROGRAMS = ("Client", "AsyncClient")
"""Classes whose constructor a program calls. The client makes objects of the other classes."""
FIRST_CLIENT = "Client"
"""The class whose first method with ``RequestOptions`` shows every option. The others refer to it by their types."""
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
[options of a request](http-api.md#options-of-a-request), [error codes](wire-protocol.md#errors), and for clients in
other languages the [wire protocol](wire-protocol.md)."""


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
    if is_dataclass(kind) or name in MADE_BY_PROGRAMS:
        yield _code(_constructor(name, kind))
    yield render(_docstring(kind, name))
    if shown := [base.__name__ for base in kind.__mro__[1:] if base in _public()]:
        yield f"Base class: {', '.join(f'[{base}](#{base.lower()})' for base in shown)}."
    if issubclass(kind, Enum):
        yield "Members: " + ", ".join(f"`{member.name}`" for member in kind) + "."
        return
    described: set[type] = set()
    for attribute, member in _members(kind):
        path = f"{name}.{attribute}"
        if isinstance(member, property):
            yield f"#### `{path}`"
            yield _code(f"{attribute}: {ast.unparse(_definition(member.fget).returns)}")
        else:
            yield f"#### `{path}()`"
            options = _keywords(inspect.unwrap(member))
            first = options is not None and name == FIRST_CLIENT and options not in described
            yield _code(_signature(inspect.unwrap(member), options if first else None))
        yield render(_docstring(member, path))
        if not isinstance(member, property) and first:
            assert options is not None
            described.add(options)
            yield render(_docstring(options, options.__name__))


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


def _keywords(function: Any) -> type | None:
    """Return the TypedDict that describes a function's further keywords. None if the function has none."""
    kinds = {name: each.kind for name, each in inspect.signature(function).parameters.items()}
    hint = next((inspect.get_annotations(function)[n] for n, k in kinds.items() if k is Parameter.VAR_KEYWORD), None)
    return get_args(hint)[0] if get_origin(hint) is Unpack else None


def _signature(function: Any, options: type | None = None) -> str:
    """Return a function's signature: types as they are written in its source, and the values of the defaults.

    options  a TypedDict whose keys stand in the place of the function's further keywords
    """
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
        if options is not None and parameter.kind is Parameter.VAR_KEYWORD:
            keys = (node for node in _definition(options).body if isinstance(node, ast.AnnAssign))
            parts += [f"{ast.unparse(key.target)}: {ast.unparse(key.annotation)} = None" for key in keys]
            continue
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
