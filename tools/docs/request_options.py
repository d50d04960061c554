"""Make the tables of a request's options from ``GenerateRequest``, ``RouteKeys`` and what the engines offer."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from model_worker.engines.embedded import check as embedded
from model_worker.engines.exllamav2 import options as exllamav2
from protocol.attribute_docs import attribute_docs
from protocol.bodies import RouteKeys
from protocol.chat import ChatFields
from protocol.presets import PRESETS
from protocol.request import ALIASES, GenerateRequest
from protocol.sampling_defaults import DEFAULTS, FORCED, LIMITS
from protocol.sampling_params import SamplingParams
from protocol.values import hints_of, json_schemas
from supervisor.requests.request import Route
from tools.docs.markdown import table, text

OFFERED: dict[str, frozenset[str]] = {"exllamav2": exllamav2.OFFERED, "transformers": embedded.OFFERED}
"""The options that each engine offers, among the options that depend on the engine."""
HEADER = ("option", "value", "default", "meaning")
_OTHER_NAMES = {name: [alias for alias, target in ALIASES.items() if target == name] for name in ALIASES.values()}


def request_options() -> str:
    """Return the tables of the options, each below its heading."""
    asked = [*("prompt", "token_ids"), *hints_of(ChatFields)]
    drawn = list(hints_of(SamplingParams))
    answer = [name for name in hints_of(GenerateRequest) if name not in asked + drawn]
    presets = [(f"`{name}`", ", ".join(f"`{k}: {v}`" for k, v in given.items())) for name, given in PRESETS.items()]
    return "\n\n".join(
        [
            _in_models_yaml(drawn),
            "### What is asked",
            "Give exactly one of `prompt`, `messages` and `token_ids`.",
            _table(asked),
            "### The answer",
            _table(answer),
            "### How tokens are drawn",
            _table(drawn),
            "### How the request is served",
            table(("option", "value", "default", "meaning"), _route_rows()),
            "### Presets",
            table(("preset", "sets"), presets),
        ]
    )


def _in_models_yaml(drawn: list[str]) -> str:
    """Return the sentences that say under which keys of a model an option may stand."""
    others = [name for name in DEFAULTS if name not in drawn]
    return "\n".join(
        [
            f"* `sampling` may have all options of *How tokens are drawn* except {_named({*drawn} - {*DEFAULTS})}. It "
            f"may also have {_named(others)}.",
            f"* `forced` may have the options of `sampling` except {_named({*DEFAULTS} - {*FORCED})}.",
            f"* `limits` may have {_named(LIMITS)}.",
        ]
    )


def _named(options: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(options))


def engines_of(option: str) -> str:
    """Return which engines offer an option."""
    offering = [name for name, offered in OFFERED.items() if option in offered]
    if not offering or len(offering) == len(OFFERED):
        return "all"
    note = ", without speculation" if option in exllamav2.GUIDANCE else ""
    return ", ".join(offering) + note


def _table(names: Iterable[str]) -> str:
    docs = attribute_docs(GenerateRequest)
    schemas = json_schemas(GenerateRequest)
    rows = []
    for name in names:
        others = ", ".join(f"`{other}`" for other in _OTHER_NAMES.get(name, ()))
        rows.append(
            (
                f'<span id="option-{name}"></span>`{name}`',
                value_of(schemas[name]),
                _default(schemas[name]["default"]),
                text(docs[name]) + (f" Other names: {others}." if others else "") + _only(name),
            )
        )
    return table(HEADER, rows)


def _only(option: str) -> str:
    engines = engines_of(option)
    return "" if engines == "all" else f" Engine {engines}."


def value_of(schema: Mapping[str, Any]) -> str:
    """Return in words what a JSON schema allows."""
    schema = schema.get("anyOf", [schema])[0]
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        most = f"at most {schema['maxItems']} " if "maxItems" in schema else ""
        return f"list of {most}{_plural(schema['items'])}"
    if schema.get("format") == "binary":
        return "bytes"
    return _NAMES[schema["type"]] + _bounds(schema)


_NAMES = {"string": "text", "boolean": "true or false", "integer": "integer", "number": "number", "object": "map"}


def _plural(items: Mapping[str, Any]) -> str:
    if items.get("type") == "string":
        return f"texts of at most {items['maxLength']} characters" if "maxLength" in items else "texts"
    return {"integer": "token ids", "object": "maps"}.get(items.get("type", ""), "messages")


def _bounds(schema: Mapping[str, Any]) -> str:
    words = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    words |= {"minLength": "of", "maxLength": "to"}
    found = [f"{word} {schema[key]:,}" for key, word in words.items() if key in schema]
    unit = " characters" if "maxLength" in schema else ""
    return "".join(f" {bound}" for bound in found) + unit


def _default(value: Any) -> str:
    return "" if value is None else f"`{json.dumps(value)}`"


def _route_rows() -> list[tuple[str, str, str, str]]:
    docs = attribute_docs(RouteKeys)
    return [
        (
            f'<span id="option-{key.name}"></span>`{key.name}`',
            rule.name,
            _default(key.default),
            text(docs[key.name]),
        )
        for key in fields(Route)
        for rule in hints_of(Route)[key.name].__metadata__
    ]
