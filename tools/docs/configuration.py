"""Make the configuration page from the schema of models.yaml: classes, types, and the texts below the keys."""

import inspect
import re
import types
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from model_worker.engines.embedded.check import EmbeddedOptions
from model_worker.engines.embedding.directory import EmbeddingOptions
from model_worker.engines.exllamav2.options import ExLlamaV2Options
from protocol.attribute_docs import attribute_docs
from protocol.values import ReadWith, Within
from supervisor.config.models import ENGINE_KEYS, LoraConfig, ModelConfig, VariantConfig
from supervisor.config.reading import parse_days, parse_lease
from supervisor.config.server import (
    Address,
    ClusterConfig,
    FileConfig,
    FolderConfig,
    GatewayConfig,
    GroupConfig,
    SupervisorConfig,
)
from supervisor.config.spelling import parse_duration
from tools.docs.markdown import page, text

ENGINE_OPTIONS: dict[str, type] = {
    "exllamav2": ExLlamaV2Options,
    "transformers": EmbeddedOptions,
    "embedding": EmbeddingOptions,
}
"""The engines that modelctl has, and the class with the defaults of their own keys."""
IMPORTED = "an import string"
INTRODUCTION = """\
models.yaml describes all models of a supervisor. `modelctl check` names every fault with its line, and `modelctl
reload` applies a changed file.

```yaml
models:
  llama-8b: # the name that clients use: a to z, 0 to 9, '.', '_', '-', at most 64 characters
    model_dir: ~/models/Llama-3.1-8B-Instruct-exl2-6.0bpw
    gpu: 0
    cache_mode: Q8
    max_batch_size: 16
supervisor: # may be left out
  stop: {drain: 2m}
```

* A **duration** is `250ms`, `30s`, `5m`, `1h`, or a number of seconds. A **size** is `20GiB` or `20G` (2³⁰ bytes
  each), `20GB` (10⁹ bytes), or a number of bytes. A **share** of a GPU is `90%`. A range such as 1 to 64 is of whole
  numbers.
* Paths may begin with `~`. Relative ones start from the directory of models.yaml; if that is a link, from the link's.
* Keys at the top that begin with `x-` may hold what some models share: `x-common: &common {gpu: 0, cache_mode: Q8}`,
  and `<<: *common` in each of them.
* `modelctl check --json-schema` prints a JSON schema for editors, which `modelctl init` names in the file; in a file of
  your own, write `# yaml-language-server: $schema=PATH`.

## Variables in values

```yaml
models:
  llama-8b:
    model_dir: ${MODELS}/Llama-3.1-8B-Instruct-exl2-6.0bpw
    gpu: ${GPU:-0}
    cache_size: ${CACHE:-65536}
```

`${NAME}` is the value of a variable of the environment, which must be set. `${NAME:-default}` has a default, for one
that is not set or empty. `$${` stands for `${`. A variable brings one value, no list and no map. On a line with
braces YAML wants quotes: `{cache_size: "${CACHE}"}`. A quoted value stays text in `sampling`, `limits`,
`template_kwargs` and `options`.

`modelctl config`, the page, errors, events and logs show `${NAME}` in place of the value, which may be a secret. What
a value becomes in use shows, such as an alias or the address of an open port. An error of an engine of your own may
show a part of the value.

A new value takes a restart of the supervisor. `check` and other commands that read the file use the variables of their
shell. A service gets them in its unit: `Environment=MODELS=/srv/models`.

## Variables that set keys

`MODELCTL_SECTION__KEY`, with two underscores, sets a key over what the file says:

| variable | sets |
|---|---|
| `MODELCTL_SUPERVISOR__STOP__DRAIN=5m` | `supervisor.stop.drain` |
| `MODELCTL_GATEWAY__LISTEN=0.0.0.0:8000` | `gateway.listen`, also where the file has no section `gateway` |
| `MODELCTL_MODELS__LLAMA_3_1_8B__CACHE_MODE=Q8` | `cache_mode` of `llama-3.1-8b`: other characters become `_` |
| `MODELCTL_DEFAULTS__CACHE_MODE=Q8` | `cache_mode` of all models without their own |
| `MODELCTL_DEFAULT_MODEL=llama-3.1-8b` | `default_model` |

A value is YAML: `MODELCTL_MODELS__B__ALIASES='[x, y]'`. A mapping replaces the file's whole mapping. No variable adds
a model.

The last of these wins: the default, the model's `tabby_config.yml`, `defaults`, the model's keys, the environment, a
flag. `modelctl config` shows each value and where it comes from:

```
$ MODELCTL_SUPERVISOR__STALL=2m modelctl config
KEY                            VALUE                           FROM
--config                       /home/ann/modelctl/models.yaml  default
models.letters.model_dir       demo:letters                    models.yaml:7
...
supervisor.stall               2m                              MODELCTL_SUPERVISOR__STALL
```

## tabby_config.yml

For engine `exllamav2`, this file in a model's directory gives defaults, with [TabbyAPI's keys](guide.md#tabbyapi). A
draft model must lie beside the model. What does not fit is left out, and `check`, `config` and the log say so."""


@dataclass(frozen=True)
class Key:
    """One key as the page shows it. ``default`` and ``engines`` are Markdown, ``example`` is YAML."""

    path: str
    type: str
    default: str
    engines: str
    description: str
    example: str

    @property
    def anchor(self) -> str:
        """Return the id that the heading gets on the site and on GitHub."""
        return self.path.replace(".", "").lower()


SECTIONS = ((SupervisorConfig, "supervisor"), (GatewayConfig, "gateway"), (ClusterConfig, "cluster"))
"""The classes of the sections beside ``models``, and their names."""
MIB = 1 << 20
MANY = 10
"""A part with more keys begins with links to them."""
SECTION_KEYS = ("models", "supervisor", "gateway", "cluster")
"""Keys of the whole file that have parts of the page of their own."""


def configuration_page() -> str:
    """Return the page."""
    return page(
        "models.yaml",
        "supervisor/config/models.py and supervisor/config/server.py",
        INTRODUCTION,
        *(part for title, kind, prefix in _sections() for part in _part(title, kind, prefix)),
    )


def all_keys() -> list[Key]:
    """Return the keys of the whole file."""
    return [key for _, kind, prefix in _sections() for key in keys_of(kind, prefix)]


def _sections() -> Iterator[tuple[str, type, str]]:
    """Yield (title, class, prefix of its keys) of each part of the page."""
    yield "Keys of a model", ModelConfig, ""
    yield "Keys of a LoRA adapter", LoraConfig, "lora."
    yield "Keys of a variant", VariantConfig, "variants.NAME."
    yield "Keys beside the models", FileConfig, ""
    yield "Keys of a folder", FolderConfig, "folders."
    yield "Keys of a group", GroupConfig, "groups.NAME."
    for kind, name in SECTIONS:
        yield from _section(kind, name)


def _section(kind: type, path: str) -> Iterator[tuple[str, type, str]]:
    """Yield a section and the sections inside it."""
    yield f"The section {path}", kind, f"{path}."
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint) and isinstance(hint, type) and hint is not Address:
            yield from _section(hint, f"{path}.{name}")


def keys_of(kind: type, prefix: str = "") -> Iterator[Key]:
    """Yield the keys of a class of the schema, without the sections that it holds."""
    hints, docs = get_type_hints(kind, include_extras=True), attribute_docs(kind)
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint) or (kind is FileConfig and field.name in SECTION_KEYS):
            continue
        description, notes = split(field.name, docs.get(field.name, ""))
        yield Key(
            prefix + field.name,
            type_name(hint),
            _default(field, hint, notes.get("Default")),
            _engines(kind, field.name),
            text(description),
            f"{field.name}: {notes['Example']}",
        )


def split(name: str, docstring: str) -> tuple[str, dict[str, str]]:
    """Return the description of a key, and the notes of the last paragraph: ``Example``, and perhaps ``Default``."""
    description, _, last = docstring.rpartition("\n\n")
    notes = {name: value for name, _, value in (line.partition(": ") for line in last.splitlines())}
    if not description or "Example" not in notes or not notes.keys() <= {"Default", "Example"}:
        raise ValueError(
            f"the key {name} needs a text below it: what it means, an empty line, perhaps a line Default: ..., and a "
            f"line Example: ..., not {docstring!r}"
        )
    return description, notes


def example_value(key: Key) -> Any:
    """Return the value of a key's example."""
    (value,) = yaml.safe_load(key.example).values()
    return value


def type_name(hint: Any) -> str:
    """Return the name of a type of the schema on the page."""
    origin, parts = get_origin(hint), get_args(hint)
    if hasattr(hint, "__metadata__"):
        inner, rule = parts
        if isinstance(rule, ReadWith):
            return rule.name
        assert isinstance(rule, Within)
        most = f"{rule.most:.15g}"
        return f"{type_name(inner)} {f'above {rule.least:g}' if rule.above else f'from {rule.least:g} to {most}'}"
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(part) for part in parts if part is not types.NoneType)
    if origin is Literal:
        return " or ".join(f"`{part}`" for part in parts)
    if origin is dict and is_dataclass(parts[1]):
        return "map from a name to " + _PLURAL[parts[1]]
    if origin is list:
        return "list of " + (_PLURAL.get(parts[0]) or _NOUN.sub(r"\1s", type_name(parts[0]), count=1))
    return _NAMES[origin or hint]


_NAMES: dict[Any, str] = {str: "text", bool: "true or false", int: "whole number", float: "number", dict: "map"}
_OBVIOUS = re.compile(r"true or false|whole number|number|duration|`|path$|size$|size from|tcp://|ADDRESS:PORT")
"""Types whose name says how a value is written. The page has no example of one."""
_PLAIN = ("true or false", "duration", "size", "days")
"""Types that are left out where a default shows how a value is written."""
_NOUN = re.compile(r"\b(number|text|path|name|origin)\b")
_PLURAL: dict[Any, str] = {
    LoraConfig: "maps with the [keys of a LoRA adapter](#keys-of-a-lora-adapter)",
    VariantConfig: "a map with the [keys of a variant](#keys-of-a-variant)",
    FolderConfig: "paths, and of maps with the [keys of a folder](#keys-of-a-folder)",
    GroupConfig: "a map with the [keys of a group](#keys-of-a-group)",
}


def _default(field: "Field[Any]", hint: Any, message: str | None) -> str:
    """Return the default of a key: the value in the schema, the words of its text, and the values of the engines."""
    if field.default_factory is not MISSING:
        value = field.default_factory()
        return f"`{value if isinstance(value, Address) else _shown(value, hint)}`"
    if field.default is MISSING:
        return "required"
    if field.default is not None:
        if message is not None:
            raise ValueError(f"{field.name}: its default is {field.default}; say it once, without Default:")
        return f"`{_shown(field.default, hint)}`"
    own = {name: getattr(options(), field.name, None) for name, options in ENGINE_OPTIONS.items()}
    known = {name: value for name, value in own.items() if field.name in ENGINE_KEYS[name]}
    several = len({*map(str, known.values())}) > 1
    found = [
        f"`{_shown(value, hint)}`" + (f" for {name}" if several else "")
        for name, value in known.items()
        if value is not None
    ]
    found = [*dict.fromkeys(found)]
    if not found and message is None:
        raise ValueError(f"{field.name}: its default is None; say in words what that means (Default:)")
    own_words = message if message and f"`{message}`" not in found else None
    return "; ".join([*([own_words] if own_words else []), *found])


def _shown(value: Any, hint: Any) -> str:
    """Return a default as it would be written in the file."""
    rule = getattr(hint, "__metadata__", (None,))[0]
    if isinstance(rule, ReadWith) and rule.how in (parse_duration, parse_lease):
        return _duration(value)
    if isinstance(rule, ReadWith) and rule.how is parse_days:
        return f"{value}d"
    if isinstance(rule, ReadWith) and rule.name.startswith("size") and value and value % MIB == 0:
        return f"{value // MIB}MiB" if value % (1024 * MIB) else f"{value // (1024 * MIB)}GiB"
    return yaml.safe_dump(value).removesuffix("\n...\n").strip()


def _duration(seconds: float) -> str:
    unit, size = next(
        (unit, size) for unit, size in (("h", 3600), ("m", 60), ("s", 1), ("ms", 1e-3)) if seconds >= size
    )
    return f"{seconds / size:g}{unit}"


def _engines(kind: type, key: str) -> str:
    """Return which engines know a key."""
    if kind is LoraConfig:
        return _engines(ModelConfig, "lora")
    if kind is VariantConfig:
        return "all"
    if kind is not ModelConfig:
        return ""
    if key == "options":
        return IMPORTED
    known = [name for name, keys in ENGINE_KEYS.items() if key in keys]
    return ", ".join(known) or "all"


def _part(title: str, kind: type, prefix: str) -> Iterator[str]:
    keys = list(keys_of(kind, prefix))
    yield f"## {title}"
    yield text(inspect.getdoc(kind) or "")
    if len(keys) > MANY:
        yield ", ".join(f"[`{key.path.removeprefix(prefix)}`](#{key.anchor})" for key in keys)
    for key in keys:
        yield f"### `{key.path}`"
        yield key.description
        default = "Required." if key.default == "required" else f"Default: {key.default}."
        engines = "" if key.engines in ("", "all") else f"Engine: {key.engines}. "
        example = "" if _OBVIOUS.match(key.type) else f"Example: `{key.example}`"
        plain = key.type in _PLAIN and key.default.startswith("`")
        value = "" if plain else f"Value: {key.type.removeprefix('whole number from ')}. "
        yield f"{value}{default} {engines}{example}".rstrip()
