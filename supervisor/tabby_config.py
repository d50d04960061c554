"""Read ``tabby_config.yml`` in a model's directory as defaults of the model's keys.

TabbyAPI, a server that has served EXL2 models, reads this file: keys of its own section ``model``, either below
``model`` or at the top, and ``draft_model`` in one of these places. Most of our keys have the same names. The file
never keeps a model from being served: what has no counterpart here, or does not fit, becomes a note. A key that
models.yaml or the environment sets wins over this file.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from protocol.values import Unfit
from supervisor.config_model import ModelConfig
from supervisor.config_rules import combination_problems, sampling_problems
from supervisor.schema_validation import fit
from supervisor.spelling import spelled
from supervisor.yaml_source import ConfigError, KeyPath, Problem, YamlSource

NAME: Final = "tabby_config.yml"
_SAME: Final = (
    "max_seq_len", "cache_size", "cache_mode", "chunk_size", "max_batch_size", "gpu_split", "autosplit_reserve",
    "tensor_parallel", "rope_scale", "rope_alpha", "tool_format",
)  # fmt: skip
_OF_DRAFT: Final = {
    "draft_rope_scale": "draft_rope_scale",
    "draft_rope_alpha": "draft_rope_alpha",
    "draft_cache_mode": "draft_cache_mode",
    "draft_num_tokens": "draft_tokens",
}
_SILENT: Final = frozenset(
    {"model_name", "model_dir", "backend", "gpu_split_auto", "use_as_default", "draft_model_dir", "draft_mode"}
)
"""Keys that say nothing which modelctl does not decide itself."""
_UNSET: Final[tuple[Any, ...]] = ("auto", -1, [], "")
"""Values with which TabbyAPI takes its own default."""

Places = Callable[[str], Path]


def lay_beneath(source: YamlSource, place_of: Places) -> list[Problem]:
    """Add the defaults of every model of a models.yaml to its values. Return the notes.

    place_of  returns the directory that a ``model_dir`` means; raises ValueError, RuntimeError or OSError
    """
    notes: list[Problem] = []
    models = source.data.get("models") if isinstance(source.data, dict) else None
    for name, entry in models.items() if isinstance(models, dict) else ():
        if not isinstance(entry, dict) or entry.get("engine", "exllamav2") != "exllamav2":
            continue
        if not isinstance(given := entry.get("model_dir"), str):
            continue  # an error of its own
        try:
            directory = place_of(given)
            file = directory / NAME
            if not file.is_file():
                continue
            tabby = YamlSource(file)
        except ConfigError as e:
            notes += e.problems
            continue
        except (ValueError, RuntimeError, OSError):  # there is no such directory, which is an error of its own
            continue
        notes += tabby.problems
        for key, value, path in defaults_of(tabby, directory, notes):
            if key in entry:
                continue
            if (why := misfit(entry, key, value)) is not None:
                notes.append(tabby.problem(path, f"is left out: {key} {why}"))
                continue
            entry[key] = value
            source.defaults["models", name, key] = (str(file), tabby.problem(path, "").line)
    return notes


def defaults_of(tabby: YamlSource, directory: Path, notes: list[Problem]) -> Iterator[tuple[str, Any, KeyPath]]:
    """Yield our keys with their values, and where the file has them. Add a note for each key without a counterpart."""
    if not isinstance(tabby.data, dict):
        notes.append(tabby.problem((), "is left out: it must be a mapping (key: value lines)"))
        return
    given: dict[str, tuple[Any, KeyPath]] = {}
    top, below = tabby.data, tabby.data.get("model")
    parts: list[tuple[KeyPath, Any]] = [((), top), (("model",), below)]
    parts += [
        ((*path, "draft_model"), part["draft_model"]) for path, part in parts if "draft_model" in dict(_items(part))
    ]
    for path, part in parts:
        given |= {str(key): (value, (*path, key)) for key, value in _items(part) if key not in ("model", "draft_model")}
    if (named := given.pop("draft_model_name", None)) is not None:  # first: the other keys of a draft model need it
        draft_dir = directory.parent / str(named[0])
        if draft_dir.is_dir():
            yield "draft_model", str(draft_dir), named[1]
        else:
            notes.append(tabby.problem(named[1], f"is left out: there is no directory {draft_dir}; set draft_model"))
    reasoning = {name: given.pop(name, None) for name in ("reasoning", "reasoning_start_token", "reasoning_end_token")}
    if (on := reasoning["reasoning"]) is not None and on[0] is True:
        start, end = reasoning["reasoning_start_token"], reasoning["reasoning_end_token"]
        markers = {"start": start[0] if start else "<think>", "end": end[0] if end else "</think>"}
        yield "reasoning", markers, on[1]
    for key, (value, path) in given.items():
        ours = key if key in _SAME else _OF_DRAFT.get(key)
        if ours is not None:
            yield ours, value, path
        elif key not in _SILENT and value is not False:
            notes.append(tabby.problem(path, "is left out: modelctl has no such key"))


def _items(part: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in part.items() if isinstance(part, dict) else ():
        if value is not None and not any(type(value) is type(unset) and value == unset for unset in _UNSET):
            yield key, value


def misfit(entry: dict[str, Any], key: str, value: Any) -> str | None:
    """Return why a value cannot be a default of a model; None if it can."""
    before, problem = _problems(entry), _problems({**entry, key: value})
    new = [message for message in problem if message not in before]
    return f"{spelled(value)}: {new[0]}" if new else None


def _problems(entry: dict[str, Any]) -> list[str]:
    try:
        config = fit(ModelConfig, entry)
        found = [f"{key} {message}" for key, message in combination_problems(config)]
        return found + [f"{'.'.join(map(str, path))} {message}" for path, message in sampling_problems(config)]
    except Unfit as e:
        return [flaw.message for flaw in e.flaws]
