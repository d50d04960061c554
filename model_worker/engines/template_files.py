"""Find the chat template in the files of a model's directory. transformers looks in the same places."""

from dataclasses import dataclass
from typing import Any

from model_worker.engine import LoadError
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.vetting import read_json

JINJA, JSON, CONFIG = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
TOOLS = "additional_chat_templates/tool_use.jinja"


@dataclass(frozen=True)
class TemplateFiles:
    """A chat template, as text.

    file         the file of the directory that holds it
    tool_source  the template for conversations with tools, if there is another one for them
    """

    file: str
    source: str
    tool_source: str | None


def find_template(directory: ModelDir) -> TemplateFiles | None:
    """Return the chat template of chat_template.jinja, of chat_template.json, or of tokenizer_config.json: the first
    that exists. None if there is none. Raises LoadError for a file that cannot be read."""
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


def _by_name(given: Any) -> dict[str, str]:
    """Return templates by name. A file holds one text, a list of {name, template}, or an object."""
    if isinstance(given, list):
        given = {str(t.get("name")): t.get("template") for t in given if isinstance(t, dict)}
    elif not isinstance(given, dict):
        given = {"default": given}
    return {name: text for name, text in given.items() if isinstance(text, str) and text}
