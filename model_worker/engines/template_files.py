"""Find the chat template in the files of a model's directory. transformers looks in the same places.

models.yaml may name another file, or one of several templates that the directory has.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_worker.engine import LoadError
from model_worker.engines.links import Bounds
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.vetting import TEMPLATE_BYTES, read_bytes, read_json

JINJA, JSON, CONFIG = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
TOOLS = "additional_chat_templates/tool_use.jinja"


@dataclass(frozen=True)
class TemplateFiles:
    """A chat template, as text.

    file         the file that holds it: its name in the directory, with the template's name if models.yaml chooses it,
                 or the path that models.yaml has
    tool_source  the template for conversations with tools, if there is another one for them
    """

    file: str
    source: str
    tool_source: str | None


def find_template(directory: ModelDir) -> TemplateFiles | None:
    """Return the chat template of chat_template.jinja, of chat_template.json, or of tokenizer_config.json: the first
    that exists. None if there is none. Raises LoadError for a file that cannot be read.

    The template that models.yaml names comes before all of these. It is for conversations with tools, too. Raises
    LoadError (key "chat_template") if there is no such template."""
    wanted = directory.chat_template
    if wanted is not None and wanted.startswith("/"):
        return TemplateFiles(wanted, _read(Path(wanted), directory.bounds.roots), None)
    if wanted is not None:
        return _named(directory, wanted)
    file, named = CONFIG, _by_name(directory.tokenizer_config.get("chat_template"))
    legacy = directory.path / JSON
    if legacy.is_file() and (found := _by_name(read_json(legacy, directory.bounds).get("chat_template"))):
        file, named = JSON, found
    for name, place in (("default", JINJA), ("tool_use", TOOLS)):
        if (path := directory.path / place).is_file():
            try:
                named[name] = directory.read(place).decode()
            except UnicodeDecodeError:
                raise LoadError(f"{path} cannot be read: it is no UTF-8 text") from None
            file = place if name == "default" else file
    source = named.get("default")
    return TemplateFiles(file, source, named.get("tool_use") or None) if source else None


def _read(file: Path, roots: tuple[Path, ...]) -> str:
    try:
        text = read_bytes(file, TEMPLATE_BYTES, Bounds.of(file.parent, map(str, roots))).decode()
        if not text.strip():
            raise ValueError("it is empty")
    except (LoadError, ValueError) as e:
        why = "it is no UTF-8 text" if isinstance(e, UnicodeDecodeError) else str(e)
        raise LoadError(f"{file} cannot be read: {why}", key="chat_template") from None
    return text


def _named(directory: ModelDir, wanted: str) -> TemplateFiles:
    named = _by_name(directory.tokenizer_config.get("chat_template"))
    if wanted not in named:
        there = f"there is {', '.join(sorted(named))[:200]}" if named else "it has none"
        message = f"{directory.path}/{CONFIG} has no chat template {wanted[:64]!r}: {there}; or name a file (*.jinja)"
        raise LoadError(message, key="chat_template")
    return TemplateFiles(f"{CONFIG}, {wanted}", named[wanted], None)


def _by_name(given: Any) -> dict[str, str]:
    """Return templates by name. A file holds one text, a list of {name, template}, or an object."""
    if isinstance(given, list):
        given = {str(t.get("name")): t.get("template") for t in given if isinstance(t, dict)}
    elif not isinstance(given, dict):
        given = {"default": given}
    return {name: text for name, text in given.items() if isinstance(text, str) and text}
