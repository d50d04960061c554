"""Make the JSON schema of models.yaml, for editors, from the classes that the supervisor reads the file with.

The schema knows the keys, their types and limits, and which keys an engine takes. It does not know which directories
exist, and few combinations of keys. `modelctl check` knows these, too, and refuses everything that the schema refuses.
"""

import json
import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from protocol.answer_formats.families import FORMATS
from protocol.attribute_docs import attribute_docs
from protocol.limits import GATEWAY_NAME, MODEL_NAME_PATTERN, SUPERVISOR_NAME
from protocol.presets import PRESETS
from protocol.process.worker_spec import OFF
from protocol.request import GenerateRequest
from protocol.sampling_defaults import DEFAULTS, FORCED, LIMITS
from protocol.values import ReadWith, Within, json_schemas, null_leaves_out
from supervisor.config.models import ENGINE_KEYS, NO_DEFAULTS, ModelConfig, VariantConfig
from supervisor.config.reading import LEAST_HELD, MIN_LEASE_S, MOST_HELD, MOST_MARKER
from supervisor.config.server import Address, FileConfig
from supervisor.config.spelling import MAX_BYTES, MAX_DURATION_S
from supervisor.config.yaml_source import NOTE_PREFIX
from tools.docs.configuration import split

Schema = dict[str, Any]
DRAFT = "http://json-schema.org/draft-07/schema#"  # the newest that yaml-language-server knows well

_VARIABLE: Schema = {"$ref": "#/definitions/variable"}
_TEXT_WITH_VARIABLE: Schema = {"type": "string", "pattern": r"\$\{", "description": "names variables: ${NAME}"}
_DURATION: Schema = {"type": "string", "pattern": r"^\d+(\.\d+)?(ms|s|m|h)$"}
_SIZE: Schema = {
    "anyOf": [
        {"type": "integer", "minimum": 1, "maximum": MAX_BYTES},
        {"type": "string", "pattern": r"^\d+(\.\d+)? ?(B|[KMGT]|[KMGT]iB|[kKMGT]B)$"},
    ]
}
_LIMIT: Schema = {"anyOf": [*_SIZE["anyOf"], {"type": "string", "pattern": r"^\d+(\.\d+)? ?%$"}]}
_UUID = "GPU-[0-9a-fA-F-]{8,64}"
_ONE_GPU: list[Schema] = [
    {"type": "integer", "minimum": 0, "maximum": 1023},
    {"type": "string", "pattern": f"^{_UUID}$"},
]
_MARKER: Schema = {"type": "string", "minLength": 1, "maxLength": MOST_MARKER}
_READ: Mapping[str, Schema] = {
    "duration": {"anyOf": [{"type": "number", "minimum": 0, "maximum": MAX_DURATION_S}, _DURATION]},
    "duration, or never": {
        "anyOf": [
            {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_DURATION_S},
            _DURATION,
            {"enum": ["never"]},
        ]
    },
    "duration from 1s to 24h": {"anyOf": [{"type": "number", "minimum": MIN_LEASE_S, "maximum": 86400}, _DURATION]},
    "auto, others, a name, or labels": {"type": "string", "minLength": 1, "maxLength": 200},
    "tcp://ADDRESS:PORT": {"type": ["string", "null"], "pattern": "^tcp://[^/]+:[0-9]{1,5}$"},
    "cpu, auto, an index, a UUID, or a list of indices and UUIDs": {
        "anyOf": [
            {"enum": ["cpu", "auto"]},
            *_ONE_GPU,
            {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"anyOf": _ONE_GPU}},
        ]
    },
    "path": {"type": "string"},
    "line of text": {"type": "string", "minLength": 1},
    "days": {"anyOf": [{"type": "string", "pattern": "^[0-9]{1,5}d$"}, {"type": "integer", "minimum": 1}]},
    "size": _SIZE,
    "size or 0": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": MAX_BYTES}, _SIZE["anyOf"][1]]},
    "size from 64KiB to 64GiB": {
        "anyOf": [{"type": "integer", "minimum": LEAST_HELD, "maximum": MOST_HELD}, _SIZE["anyOf"][1]]
    },
    "size, or a list of sizes": {"anyOf": [*_SIZE["anyOf"], {"type": "array", "minItems": 1, "items": _SIZE}]},
    "size or share of a GPU, or a map from GPU to one of them": {
        "anyOf": [
            *_LIMIT["anyOf"],
            {
                "type": "object",
                "propertyNames": {"pattern": rf"^([0-9]{{1,3}}|{_UUID})$"},
                "additionalProperties": _LIMIT,
            },
        ]
    },
    "ram or off": {"enum": ["ram", OFF, False]},
    "name of a format, or off": {"enum": [*FORMATS, OFF, False]},
    "{start: TEXT, end: TEXT}, or off": {
        "anyOf": [
            {"enum": [OFF, False]},
            {
                "type": "object",
                "properties": {"start": _MARKER, "end": _MARKER},
                "required": ["start", "end"],
                "additionalProperties": False,
            },
        ]
    },
    "ADDRESS:PORT": {"type": ["string", "integer"], "minimum": 1, "maximum": 65535, "minLength": 1},
    "host name": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9.-]*$"},
    "origin": {"type": "string", "pattern": r"^https?://[A-Za-z0-9.\-\[\]:]{1,255}$"},
}
"""The schema of each value with a form of its own, by the name that ``supervisor.config.reading`` gives to the form."""


def models_schema() -> str:
    """Return the text of the schema's file."""
    made = _mapping(FileConfig)
    name: Schema = {"pattern": MODEL_NAME_PATTERN, "not": {"enum": [SUPERVISOR_NAME, GATEWAY_NAME]}}
    made["properties"]["models"] |= {"propertyNames": name}
    model = made["properties"]["models"]["additionalProperties"]
    keys = {key: value for key, value in model["properties"].items() if key not in NO_DEFAULTS}
    made["properties"]["defaults"] |= {"additionalProperties": False, "properties": keys}
    folder = made["properties"]["folders"].pop("items")
    folder["properties"]["defaults"] |= {"additionalProperties": False, "properties": keys}
    made["properties"]["folders"].pop("type")
    made["properties"]["folders"] |= {
        "anyOf": [
            {"type": "string"},
            folder,
            {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, folder]}},
        ]
    }
    made.pop("required")
    some: Schema = {"required": ["models"], "properties": {"models": {"minProperties": 1}}}
    made["anyOf"] = [some, {"required": ["folders"]}]
    made |= {
        "if": {"required": ["defaults"]},
        "then": _each_model({"allOf": _engine_rules(alone=False)}),
        "else": _each_model({"allOf": _engine_rules(alone=True)}),
    }
    made["patternProperties"] = {f"^{NOTE_PREFIX}": True}
    definitions = {"variable": _TEXT_WITH_VARIABLE}
    head = {"$schema": DRAFT, "title": "models.yaml of modelctl", "definitions": definitions}
    return json.dumps(head | made, indent=1, ensure_ascii=False) + "\n"


def _mapping(kind: type) -> Schema:
    """Return the schema of a mapping with the keys of a dataclass."""
    hints, docs = get_type_hints(kind, include_extras=True), attribute_docs(kind)
    hints |= {name: hints[name] | None for name in null_leaves_out(kind)}
    made: Schema = {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            field.name: _described(field, docs.get(field.name, "")) | _of(hints[field.name]) for field in fields(kind)
        },
    }
    if required := [field.name for field in fields(kind) if field.default is field.default_factory is MISSING]:
        made["required"] = required
    if kind in (ModelConfig, VariantConfig):
        made["properties"]["sampling"] |= {"additionalProperties": False, "properties": _sampling()}
        forced = {name: schema for name, schema in _sampling().items() if name in FORCED}
        made["properties"]["forced"] |= {"additionalProperties": False, "properties": forced}
    if kind is ModelConfig:
        made["properties"]["limits"] |= {"additionalProperties": False, "properties": _limits()}
        made["properties"]["engine"] |= {"anyOf": [{"enum": [*ENGINE_KEYS]}, {"pattern": ":"}, _VARIABLE]}
    return made


def _described(field: "Field[Any]", text: str) -> Schema:
    """Return the text that an editor shows for a key. A section has none."""
    return {"description": " ".join(split(field.name, text)[0].replace("``", "`").split())} if text else {}


def _of(hint: Any) -> Schema:
    """Return the schema of a type, as ``reading.fit`` reads it."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        inner, rule = parts
        if isinstance(rule, ReadWith):
            if rule.name not in _READ:
                raise ValueError(
                    f"a value that a function reads has the name {rule.name!r} (ReadWith of {rule.how.__name__}), and "
                    "no JSON schema: write one under that name in _READ of tools/docs/models_schema.py"
                )
            return _or_variable(_READ[rule.name])
        assert isinstance(rule, Within)
        bounds = {"exclusiveMinimum" if rule.above else "minimum": rule.least, "maximum": rule.most}
        (plain,) = (part for part in get_args(inner) or (inner,) if part is not types.NoneType)
        within = {"type": "integer" if plain is int else "number"} | bounds
        return _or_variable(_or_null(within) if get_args(inner) else within)
    if origin in (Union, types.UnionType):
        (other,) = (part for part in parts if part is not types.NoneType)
        return _or_null(_of(other))
    if origin is Literal:
        return _or_variable({"enum": [*parts]})
    if origin is list:
        return {"type": "array", "items": _of(parts[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": True if parts[1] is Any else _of(parts[1])}
    if is_dataclass(hint) and isinstance(hint, type):
        assert hint is not Address, "an address is read by a function"
        return _mapping(hint)
    return _or_variable({"type": {str: "string", bool: "boolean", int: "integer", float: "number"}[hint]})


def _or_variable(schema: Schema) -> Schema:
    """Return the schema of a value in whose place a text may stand that names variables of the environment."""
    if schema == {"type": "string"}:
        return schema
    return {"anyOf": [*(schema["anyOf"] if schema.keys() == {"anyOf"} else [schema]), _VARIABLE]}


def _or_null(schema: Schema) -> Schema:
    """Return the schema of a value that may be null, which means that the key is not set."""
    if "anyOf" in schema:
        return schema | {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return schema | ({"enum": [*schema["enum"], None]} if "enum" in schema else {"type": [schema["type"], "null"]})


def _sampling() -> Schema:
    """Return the schemas of the keys of ``sampling``. A request has keys of the same names."""
    known = json_schemas(GenerateRequest)
    made: Schema = {}
    for name in sorted(DEFAULTS):
        made[name] = _or_variable({key: value for key, value in known[name].items() if key != "default"})
    return made | {"preset": _or_variable({"enum": [*PRESETS]})}


def _limits() -> Schema:
    """Return the schemas of the keys of ``limits``."""
    return {
        name: _or_variable({"type": "integer" if kind is int else "number", "minimum": 0})
        for name, kind in LIMITS.items()
    }


def _each_model(rule: Schema) -> Schema:
    return {"properties": {"models": {"additionalProperties": rule}}}


def _engine_rules(alone: bool) -> list[Schema]:
    """Return, for each engine, which keys it does not take, and which it needs.

    alone  the model's entry has all its keys, because the file has no defaults
    """
    every = frozenset[str]().union(*ENGINE_KEYS.values())
    rules: list[Schema] = [
        {"if": _engine(_names(name), alone and name == "exllamav2"), "then": _without(*(every - keys), "options")}
        for name, keys in ENGINE_KEYS.items()
    ]
    rules.append({"if": _engine({"type": "string", "pattern": ":"}, False), "then": _without(*every)})
    needs_gpu: Schema = {"required": ["gpu"], "properties": {"gpu": {"not": {"enum": ["cpu", None]}}}}
    return [*rules, {"if": _engine(_names("exllamav2"), True), "then": needs_gpu}] if alone else rules


def _names(engine: str) -> Schema:
    """Return the schema of the key ``engine`` where it means this engine."""
    return {"enum": [engine, None]} if engine == ModelConfig.engine else {"const": engine}


def _engine(value: Schema, is_default: bool) -> Schema:
    """Return the condition that the engine is this one."""
    return {"properties": {"engine": value}} | ({} if is_default else {"required": ["engine"]})


def _without(*names: str) -> Schema:
    """Return the schema of a mapping that has none of these keys, or has them as null."""
    return {"properties": {name: {"type": "null"} for name in sorted(names)}}
