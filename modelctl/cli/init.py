"""The command init: write a first models.yaml."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from modelctl.cli import exit_codes
from modelctl.cli.options import NAME, SCHEMA, as_json
from modelctl.cli.root import ADD_TEMPLATE, CommandFailure, command, say
from protocol.process.worker_spec import missing_for, missing_for_gateway
from supervisor.config.file import DEMO_PREFIX, demo_models

if TYPE_CHECKING:
    from supervisor.config.foreign import ForeignModel

SAMPLE = Path(__file__).with_name("models.yaml")
_SCHEMA_LINE = f"# yaml-language-server: $schema={SCHEMA.as_uri()}\n"
"""The first line of a written file. Editors take the schema from it. The sample's first line names another path."""
LISTEN = "127.0.0.1:8000"
"""The address of HTTP in a written file."""


@dataclass(frozen=True)
class Entry:
    """One model of the file.

    keys      the keys of its entry in models.yaml
    template  the file with its chat template; "" without one, None if that is not known
    original  the name by which clients of other servers ask for the model; "" if there is none
    """

    name: str
    keys: dict[str, Any]
    template: str | None = None
    original: str = ""


@dataclass
class Draft:
    """What a models.yaml is about to say.

    options   the command line behind ``modelctl init``, for people
    left_out  directories without an entry → the reason
    gateway   the section ``gateway``; empty if no port is opened
    folders   directories whose models need no entries
    missing   models of another program's file that cannot be served as they are
    notes     what that file says without a counterpart
    lazy      why the models are lazy, or not, as a comment of the file; "" if another program's file has decided that
    """

    options: str
    entries: list[Entry]
    left_out: dict[str, str] = field(default_factory=dict)
    gateway: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    folders: list[dict[str, Any]] = field(default_factory=list)
    missing: "list[ForeignModel]" = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lazy: str = ""


@command(
    ("modelctl init ~/models", "Write ./models.yaml with an entry for each model below a directory"),
    ("modelctl init --from ~/tabbyAPI/config.yml", "Take over the models of another server"),
)
@click.argument("directory", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--force", is_flag=True, help="Replace ./models.yaml if there is one.")
@click.option(
    "--model-root",
    "roots",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False, resolve_path=True),
    help="Directory into which files of the models may be links.",
)
@click.option(
    "--from",
    "foreign",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Translate TabbyAPI's config.yml or llama-swap's config.yaml.",
)
@click.option(
    "--http",
    type=click.Choice(["none", "keys", "off"]),
    help=f"Open http://{LISTEN} without a token (none), for keys only (keys), or not (off). Asked on a terminal.",
    show_default="none",
)
@as_json
def init(
    directory: Path | None, force: bool, roots: tuple[Path, ...], foreign: Path | None, http: str | None, as_json: bool
) -> None:
    """Write ./models.yaml. Starts nothing.

    With DIRECTORY, the file gets an entry for each model at or below DIRECTORY that an engine can load, and a section
    `gateway` for HTTP. With --from, it gets what another program's file says. Without both, the file is a sample with
    the demo models and with every key explained.
    """
    if foreign is not None and directory is not None:
        raise click.UsageError("give a DIRECTORY or --from, not both: the file of --from names its models")
    file = Path(NAME)
    if file.exists() and not force:
        raise _exists(file)
    if directory is None and foreign is None:
        demo = [Entry(name, {"model_dir": DEMO_PREFIX + name, "engine": "transformers"}) for name in demo_models()]
        draft = Draft("", demo)
        text = _SCHEMA_LINE + SAMPLE.read_text(encoding="utf-8").partition("\n")[2]
    else:
        draft = _translated(foreign, roots) if foreign is not None else _found(cast(Path, directory), roots)
        if http is None and not draft.gateway:
            http = _ask_for_http() if sys.stdin.isatty() and sys.stderr.isatty() and not as_json else "none"
        if http is not None:
            draft.gateway = {} if http == "off" else {"listen": LISTEN, "auth": http}
        text = _text(draft, roots)
    try:
        _write(file, text, force)
    except FileExistsError:
        raise _exists(file) from None
    except OSError as e:
        raise CommandFailure(
            exit_codes.CONFIG, "not_usable", f"{file.absolute()} cannot be written: {e.strerror}"
        ) from None
    _tell(file.absolute(), draft, as_json)


def _ask_for_http() -> str:
    """Ask the user how HTTP is to be opened. Return a value of ``--http``."""
    say(
        f"HTTP at {LISTEN}, for OpenAI's and Anthropic's APIs and the page:\n"
        "  none  no token: every user and every program of this machine may use, start and stop the models\n"
        "  keys  each client needs a token, which `modelctl keys new NAME --http` makes\n"
        "  off   no port"
    )
    answer: str = click.prompt("which", type=click.Choice(["none", "keys", "off"]), default="none", err=True)
    return answer


def _write(file: Path, text: str, force: bool) -> None:
    """Write the whole file or nothing. Raises OSError, and FileExistsError if the file exists and not ``force``."""
    if not force:
        file.open("x").close()  # now no other process can create it
    written = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        written.write_text(text, encoding="utf-8")
        written.replace(file)
    except OSError:
        for unfinished in (written,) if force else (written, file):
            unfinished.unlink(missing_ok=True)
        raise


def _exists(file: Path) -> CommandFailure:
    message = f"{file.absolute()} exists already and is left as it is; --force replaces it"
    return CommandFailure(exit_codes.CONFIG, "exists", message)


def _found(directory: Path, roots: Sequence[Path]) -> Draft:
    entries, left_out = _entries(directory, roots)
    _add_aliases(entries)
    if len(entries) > 1:
        for entry in entries:
            entry.keys["lazy"] = True
    return Draft(_printable(str(directory)), entries, left_out, lazy=_LAZY if len(entries) > 1 else _NOT_LAZY)


def _translated(file: Path, roots: Sequence[Path]) -> Draft:
    """Return what another program's file becomes. Raises CommandFailure if it is none that is known."""
    from supervisor.config.foreign import read_foreign
    from supervisor.config.yaml_source import ConfigError, YamlSource
    from supervisor.placement.estimates import unused_gpus

    try:
        foreign = read_foreign(YamlSource(file), os.environ)
    except ConfigError as e:
        raise CommandFailure(exit_codes.CONFIG, "config", *map(str, e.problems)) from None
    if foreign is None:
        message = f"{file} is neither TabbyAPI's config.yml nor llama-swap's config.yaml"
        raise CommandFailure(exit_codes.CONFIG, "config", message)
    draft = Draft(f"--from {_printable(str(file))}", [], gateway=foreign.gateway, groups=foreign.groups)
    draft.notes += foreign.notes
    if foreign.folder is not None:
        implied = {"model_dir": ".", "engine": "exllamav2", "gpu": "auto", "lazy": True}
        given = implied if unused_gpus() else implied | {"engine": "transformers", "gpu": "cpu"}
        any_model = Entry("folders", dict(given))
        _overlay(any_model, foreign.common, draft.notes)
        defaults = {key: value for key, value in any_model.keys.items() if implied.get(key) != value}
        folder = os.path.abspath(foreign.folder.expanduser())
        draft.folders.append({"path": folder, **({"defaults": defaults} if defaults else {})})
        if not os.path.isdir(folder):
            draft.notes.append(f"model.model_dir: there is no directory {folder} here")
    _take_over(foreign.models, draft, roots)
    there = {entry.name for entry in draft.entries}
    for name, group in list(draft.groups.items()):
        group["models"] = [model for model in group["models"] if model in there]
        if not group["models"]:
            del draft.groups[name]
    _add_aliases(draft.entries)
    return draft


def _take_over(models: "Sequence[ForeignModel]", draft: Draft, roots: Sequence[Path]) -> None:
    """Add the models of another program's file to the draft, or their keys to the entries that their directories have.

    The directories are looked at together, because each look reads the GPUs and starts a process.
    """
    from supervisor.config.foreign import plain_name

    entry_of = {Path(entry.keys["model_dir"]): entry for entry in draft.entries}
    directories = [model.model_dir.expanduser() for model in models if model.model_dir is not None]
    unknown = [path for path in directories if path.is_dir() and path.resolve() not in entry_of]
    chosen = _choose(unknown, roots) if unknown else {}
    for model in models:
        if model.model_dir is None:
            draft.missing.append(model)
            continue
        directory = model.model_dir.expanduser()
        if (entry := entry_of.get(directory.resolve())) is not None:  # the other program loads it when it starts
            entry.keys.pop("lazy", None)
        else:
            # A directory that is not here is for `check` to report: the file may be for another machine.
            choice = chosen.get(directory, ({}, None))
            if isinstance(choice, str):
                model.why_not = choice
                draft.missing.append(model)
                continue
            keys = choice[0] or {"engine": "exllamav2", "gpu": "auto"}
            entry = Entry(plain_name(model.name), {"model_dir": str(directory), **keys}, choice[1], model.name)
            draft.entries.append(entry)
        _overlay(entry, model.keys, draft.notes)


def _overlay(entry: Entry, keys: Mapping[str, Any], notes: list[str]) -> None:
    """Set keys of an entry. A value that does not fit is left out, with a note."""
    from supervisor.config.foreign import misfit

    for key, value in keys.items():
        if key in ("sampling", "forced"):  # one option that is not known must not cost the others
            whys = {name: misfit(entry.keys, key, {name: option}) for name, option in value.items()}
            notes += [f"{entry.name}: {key}.{name} is left out: {why}" for name, why in whys.items() if why]
            fitting = {name: option for name, option in value.items() if not whys[name]}
            if fitting:
                entry.keys[key] = entry.keys.get(key, {}) | fitting
        elif why := misfit(entry.keys, key, value):
            notes.append(f"{entry.name}: {key} is left out: {why}")
        else:
            entry.keys[key] = value
            if key == "gpu":
                entry.keys.pop("gpus", None)


def _entries(directory: Path, roots: Sequence[Path]) -> tuple[list[Entry], dict[str, str]]:
    """Return an entry for each model below a directory, and the directories that were left out, each with the reason.

    Raises CommandFailure if no model can be loaded.
    """
    from supervisor.config.model_search import MOST_DIRECTORIES, find_models, name_of, original_name

    root = directory.resolve()
    try:
        found = find_models(root)
    except OSError as e:
        raise CommandFailure(exit_codes.CONFIG, "not_usable", f"{root} cannot be searched: {e.strerror}") from None
    for unread, why in found.unread.items():
        say(f"modelctl: {_printable(unread)} is not searched: {why}")
    if not found.complete:
        say(f"modelctl: {root} is searched in part only: it has more than {MOST_DIRECTORIES} directories")
    searched = [*found.models, *found.gguf]
    chosen = _choose(searched, roots)
    entries: list[Entry] = []
    left_out: dict[str, str] = {}
    for path in searched:
        choice = chosen[path]
        if isinstance(choice, str):
            left_out[str(path)] = choice.removeprefix(f"{path} ")
            continue
        keys, template = choice
        name = name_of(path, {entry.name for entry in entries})
        entries.append(Entry(name, {"model_dir": str(path), **keys}, template, original_name(path)))
    if not entries:
        reasons = [f"{_printable(path)}: {why}" for path, why in left_out.items()]
        message = "none of them can be loaded" if reasons else "a model's directory has config.json and *.safetensors"
        raise CommandFailure(exit_codes.CONFIG, "no_models", f"no model found in {root}: {message}", *reasons)
    return entries, left_out


def _add_aliases(entries: Sequence[Entry]) -> None:
    """Give each model its original name as an alias, where that is valid and means no other model."""
    from supervisor.config.rules import is_alias

    wanted = [entry.original for entry in entries]
    names = {name for entry in entries for name in (entry.name, *entry.keys.get("aliases", ()))}
    for entry in entries:
        if is_alias(entry.original) and entry.original not in names and wanted.count(entry.original) == 1:
            entry.keys["aliases"] = [entry.original, *entry.keys.get("aliases", ())]


def _choose(directories: Sequence[Path], roots: Sequence[Path]) -> dict[Path, tuple[dict[str, Any], str | None] | str]:
    """Return the keys that suit each model and the file with its chat template, or why no engine can load it.

    Engine embedding takes only what says by itself that it makes vectors or scores, so it is tried first: other engines
    would take its language models, too. On a machine with a GPU, engine exllamav2 is tried before engine transformers.
    On other machines transformers is first.
    """
    from protocol.process.worker_spec import EngineSpec
    from supervisor.placement.estimates import CONTEXT, Question, ask_now, fewest_gpus, unused_gpus
    from supervisor.placement.policy import GpuRequest

    engines: list[dict[str, Any]] = [{"engine": "exllamav2", "gpu": "auto"}, {"engine": "transformers", "gpu": "cpu"}]
    gpus = unused_gpus()
    if not gpus:
        engines.reverse()
    engines.insert(0, {"engine": "embedding", "gpu": "auto" if gpus else "cpu"})
    chosen: dict[Path, tuple[dict[str, Any], str | None]] = {}
    reasons: dict[Path, dict[str, str]] = {path: {} for path in directories}
    for engine in engines:
        left = [path for path in directories if path not in chosen]
        # Engine embedding keeps no cache, so a long context takes no memory.
        for context in (None,) if engine["engine"] == "embedding" else (CONTEXT, None):
            device = "cpu" if engine["gpu"] == "cpu" else "cuda"
            specs = [
                EngineSpec(path.name, engine["engine"], str(path), device, context, model_roots=(*map(str, roots),))
                for path in left
            ]
            counts = GpuRequest(None).counts if engine["engine"] == "exllamav2" else (1,)
            answers = dict(zip(left, ask_now([Question(spec, counts=counts) for spec in specs]), strict=True))
            left = []
            for path, estimated in answers.items():
                if not estimated.faults:
                    recommended = {"sampling": dict(estimated.sampling)} if estimated.sampling else {}
                    count = fewest_gpus(estimated, gpus) if engine["gpu"] == "auto" else 1
                    size = {"gpus": count} if count > 1 else {}
                    keys = {**engine, **size, **({"max_seq_len": context} if context else {}), **recommended}
                    chosen[path] = keys, estimated.template
                elif context is not None and all(fault.key == "max_seq_len" for fault in estimated.faults):
                    left.append(path)  # the model has less context: try with its own
                elif all(fault.key not in ("pooling", "task") for fault in estimated.faults):  # else no such model
                    own = [fault.message for fault in estimated.faults if context is None or fault.key != "max_seq_len"]
                    reasons[path][engine["engine"]] = own[0]
    return {path: chosen.get(path, _in_words(reasons[path])) for path in directories}


def _in_words(reasons: Mapping[str, str]) -> str:
    """Return why no engine can load a model. A fault that all engines find is named once."""
    if len({*reasons.values()}) == 1:
        return next(iter(reasons.values()))
    return "; ".join(f"engine {engine}: {why}" for engine, why in reasons.items())


_COMMENTS = {
    "aliases": "further names: the folder's, which clients of other servers ask for",
    "gpus": "it does not fit on one: the layers are divided",
    "max_seq_len": "tokens of context; more take more memory, up to the model's own context",
    "sampling": "from the model's generation_config.json; for options that a request leaves out",
    "lazy": "loaded by its first request; without this line, when the supervisor starts",
}
_LAZY = """\
# All models are lazy, because together they may not fit into memory: the first request to a model loads it, and a model
# that is idle makes room for another one on its GPU. Remove the line `lazy: true` of a model that has to be ready at
# once. `modelctl plan` then shows what fits. `ttl: 10m` unloads a lazy model that had no request for ten minutes."""
_NOT_LAZY = """\
# The model is loaded when the supervisor starts, because it is the only one. With the line `lazy: true` its first
# request loads it."""


_FOLDERS = """\
# Every model below this directory is served, also one that comes later. Its first request loads it. `modelctl check`
# lists the models. One with keys of its own needs an entry below `models`."""
_HTTP = """\
# OpenAI's and Anthropic's APIs, and the page http://{place}/."""
_AUTH = {
    "none": """\
# No token is needed: every user and every program of this machine may use, start and stop the models. With `auth: keys`
# each client needs a token, which `modelctl keys new NAME --http` makes.""",
    "keys": "# Each client needs a token, which `modelctl keys new NAME --http` makes.",
}
_NO_HTTP = f"""\
# No port is open. This line opens OpenAI's and Anthropic's APIs, and a page, for clients with a token:
# gateway: {{listen: "{LISTEN}", auth: keys}}"""


def _text(draft: Draft, roots: Sequence[Path]) -> str:
    """Return the content of a models.yaml."""
    lines = [
        f"# Written by `modelctl init {draft.options}`. `modelctl check` says what is wrong with it.",
        "# `modelctl init` in an empty directory writes a sample that explains every key.",
    ]
    if draft.lazy:
        lines += ["#", draft.lazy]
    lines.append("")
    if draft.gateway:
        place = draft.gateway["listen"].replace("0.0.0.0", "127.0.0.1").replace("[::]", "[::1]")
        lines += [_HTTP.format(place=place), _AUTH[draft.gateway["auth"]], f"gateway: {_in_line(draft.gateway)}"]
    else:
        lines.append(_NO_HTTP)
    lines.append("")
    if roots:
        lines += [f"supervisor: {_in_line({'model_roots': [*map(str, roots)]})}", ""]
    if draft.groups:
        lines += ["groups:", *(f"  {name}: {_in_line(group)}" for name, group in draft.groups.items()), ""]
    if draft.folders:
        lines += [_FOLDERS, "folders:", *(f"  - {_in_line(folder)}" for folder in draft.folders), ""]
    if draft.entries or not draft.folders:
        lines.append("models:")
    elif draft.missing:
        lines.append("# models:")
    for entry in draft.entries:
        lines += [*_entry_lines(entry.name, entry.keys), ""]
    for model in draft.missing:
        keys = {"model_dir": "DIRECTORY", **model.keys}
        commented = [f"  # {line.removeprefix('  ')}" for line in _entry_lines(model.name, keys)]
        lines += [f"  # {_printable(model.name)} is left out: {_printable(model.why_not)}", *commented, ""]
    lines += [f"# left out: {_printable(path)}: {why}" for path, why in draft.left_out.items()]
    lines += [f"# no counterpart: {_printable(note)}" for note in draft.notes]
    return _SCHEMA_LINE + "\n".join(lines).rstrip() + "\n"


def _entry_lines(name: str, keys: Mapping[str, Any]) -> list[str]:
    import yaml

    lines = [f"  {yaml.safe_dump(name).splitlines()[0]}:"]  # quoted if YAML would read a date
    for key, value in keys.items():
        nested = isinstance(value, dict | list)
        line = f"{key}: {_in_line(value)}" if nested else _dumped({key: value})
        lines.append(f"    {line:<24} # {_COMMENTS[key]}" if key in _COMMENTS else f"    {line}")
    return lines


def _in_line(value: Any) -> str:
    return _dumped(value, in_line=True)


def _dumped(value: Any, in_line: bool = False) -> str:
    """Return a value as YAML in which ``${`` is text, because models.yaml would take it for a variable."""
    import yaml

    text: str = yaml.safe_dump(
        value, allow_unicode=True, width=1 << 20, default_flow_style=in_line, sort_keys=not in_line
    )
    return text.rstrip().replace("${", "$${")


def _tell(file: Path, draft: Draft, as_json: bool) -> None:
    """Say what was written, what was left out, and what is missing on this machine."""
    entries, left_out = draft.entries, draft.left_out
    missing = {model.name: model.why_not for model in draft.missing}
    if as_json:
        models = [{"name": entry.name, **entry.keys, **_template_key(entry)} for entry in entries]
        out = [{"model_dir": path, "why": why} for path, why in left_out.items()]
        folders = {"folders": draft.folders} if draft.folders else {}
        more = {"missing": missing, "notes": draft.notes} if missing or draft.notes else {}
        click.echo(json.dumps({"file": str(file), "models": models, "left_out": out, **folders, **more}, indent=2))
        return
    for path, why in left_out.items():
        say(f"left out: {_printable(path)}: {why}")
    for name, why in missing.items():
        say(f"left out: {_printable(name)}: {_printable(why)}")
    for note in draft.notes:
        say(f"no counterpart: {_printable(note)}")
    click.echo(f"{file}: written; models: {', '.join(entry.name for entry in entries) or 'none'}")
    for folder in draft.folders:
        click.echo(f"each model below {_printable(folder['path'])} is served, too: `modelctl check` lists them")
    for entry in entries:
        if entry.template is not None:
            click.echo(f"{entry.name}: " + (f"chat template in {entry.template}" if entry.template else ADD_TEMPLATE))
    engines = dict.fromkeys(str(entry.keys["engine"]) for entry in entries)
    for package in filter(None, map(missing_for, engines)):
        click.echo(f"before they can be served here: {package}")
    if draft.gateway and (lacking := missing_for_gateway()):
        click.echo(f"before HTTP can be served here: {lacking}")


def _template_key(entry: Entry) -> dict[str, str]:
    return {} if entry.template is None else {"template": entry.template}


def _printable(text: str) -> str:
    """Return a directory's name without control characters, for a comment of the file or for a terminal."""
    return repr(text)[1:-1]
