"""Read the configuration files of TabbyAPI and llama-swap, for ``init --from``. Pure: nothing that they name is run.

Each key of such a file either becomes keys of models.yaml, or a note that says what to do instead. A key that says what
modelctl does anyway is left out without a note.
"""

import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from protocol.limits import MODEL_NAME_PATTERN
from protocol.values import Unfit
from supervisor.config.models import ModelConfig
from supervisor.config.reading import fit
from supervisor.config.rules import combination_problems, is_template_file, sampling_problems
from supervisor.config.spelling import spelled
from supervisor.config.yaml_source import ConfigError, KeyPath, Problem, YamlSource

# Read ``tabby_config.yml`` in a model's directory as defaults of the model's keys.
#
# TabbyAPI, a server that has served EXL2 models, reads this file: keys of its own section ``model``, either below
# ``model`` or at the top, and ``draft_model`` in one of these places. Most of our keys have the same names. The file
# never keeps a model from being served: what has no counterpart here, or does not fit, becomes a note. A key that
# models.yaml or the environment sets wins over this file.


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
        if not isinstance(entry, dict) or (entry.get("engine") or "exllamav2") != "exllamav2":
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


TABBY: Final = "TabbyAPI"
LLAMA_SWAP: Final = "llama-swap"
_TABBY_SECTIONS: Final = frozenset({"network", "model", "draft_model", "sampling", "developer", "lora", "embeddings"})
TOKENS: Final = "admit each token with `modelctl keys new NAME --token-file FILE`, or make new ones with --http"


@dataclass
class ForeignModel:
    """One model of the file.

    name       the name that clients use
    model_dir  its directory; None if the file does not name one that an engine could load
    keys       its keys in models.yaml. Those that do not fit are dropped later, with a note
    why_not    why there is no ``model_dir``, for people
    """

    name: str
    model_dir: Path | None
    keys: dict[str, Any] = field(default_factory=dict)
    why_not: str = ""


@dataclass
class ForeignConfig:
    """What a file of another program becomes.

    models   the models that it names
    folder   a directory whose models clients may all ask for; None if there is none
    common   keys for each model of the folder
    gateway  the section ``gateway``
    groups   the section ``groups``
    notes    what has no counterpart, each with what to do instead
    """

    program: str
    models: list[ForeignModel] = field(default_factory=list)
    folder: Path | None = None
    common: dict[str, Any] = field(default_factory=dict)
    gateway: dict[str, Any] = field(default_factory=dict)
    groups: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def program_of(data: Any) -> str | None:
    """Return the program whose configuration a file holds; None if it is that of no other program that is known."""
    if not isinstance(data, dict):
        return None
    models = data.get("models")
    if isinstance(models, dict) and any(isinstance(model, dict) and "cmd" in model for model in models.values()):
        return LLAMA_SWAP
    model = data.get("model")
    if "models" not in data and isinstance(model, dict) and _TABBY_SECTIONS & (data.keys() - {"model"}):
        return TABBY
    return TABBY if isinstance(model, dict) and "model_name" in model else None


def read_foreign(source: YamlSource, environment: Mapping[str, str]) -> ForeignConfig | None:
    """Return what the file becomes; None if it is no configuration of a program that is known.

    environment  the variables that the file may name
    """
    program = program_of(source.data)
    if program == TABBY:
        return _Tabby(source).read()
    return _llama_swap(source, environment) if program == LLAMA_SWAP else None


def _map(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_set(value: Any) -> bool:
    return value not in (None, "", False) and value != [] and value != {}


# --- TabbyAPI ---------------------------------------------------------------------------------------------------------

_TABBY_NOTES: Final = {
    "network.send_tracebacks": "errors never hold tracebacks; the logs do (`modelctl logs`)",
    "logging.log_prompt": "prompts are never logged; `modelctl story ID` tells how a request went",
    "logging.log_generation_params": "`modelctl story ID` tells how a request went",
    "logging.log_requests": "`request_log` writes a line for each request, without its text",
    "logging.log_chat_completion_requests": "prompts are never logged",
    "model.vision": "images are not served",
    "model.force_enable_thinking": "`template_kwargs` sets it here for requests that leave it out",
    "model.num_experts_per_token": "the model's own number of experts is used",
    "draft_model.draft_gpu_split": "the draft model lies on the first GPU of its model",
    "embeddings.embedding_model_name": "add an entry with engine: embedding for it",
}
_TABBY_SILENT: Final = frozenset(
    {
        "network.host", "network.port", "network.disable_auth", "network.disable_fetch_requests", "network.api_servers",
        "model.model_dir", "model.model_name", "model.inline_model_loading", "model.use_dummy_models",
        "model.dummy_model_names", "model.use_as_default", "model.backend", "model.gpu_split_auto",
        "model.tensor_parallel_backend", "model.output_chunking", "model.reasoning_start_token",
        "model.reasoning_end_token", "draft_model.draft_model_dir", "draft_model.draft_mode",
        "draft_model.draft_model_name", "draft_model.ngram_match_min", "lora.lora_dir", "lora.loras",
        "sampling.override_preset", "embeddings.embedding_model_dir", "embeddings.embeddings_device",
        "memory.sysmem_recurrent_cache", "memory.cuda_malloc_async", "developer.unsafe_launch", "developer.seqlog",
        "developer.seqlog_server_url", "developer.realtime_process_priority", "developer.uvloop",
        "developer.cuda_malloc_backend", "model.prompt_template",
    }
)  # fmt: skip
"""Keys that are read elsewhere in this file, and keys that say nothing which modelctl does not decide itself."""


_TABBY_DEFAULTS: Final = {
    "chunk_size": 2048, "rope_scale": 1.0, "tensor_parallel": False, "autosplit_reserve": [96], "cache_mode": "FP16",
    "draft_rope_scale": 1.0, "draft_cache_mode": "FP16",
}  # fmt: skip
"""Values that the sample file has. modelctl has the same ones, or better ones."""


class _Tabby:
    """Reads the config.yml of TabbyAPI. Relative directories start at the file's directory, as there."""

    def __init__(self, source: YamlSource) -> None:
        self._source = source
        self._data = _map(source.data)
        self._base = Path(source.file).parent
        self._out = ForeignConfig(TABBY)

    def read(self) -> ForeignConfig:
        model, out = _map(self._data.get("model")), self._out
        self._network(_map(self._data.get("network")))
        folder = self._base / str(model.get("model_dir") or "models")
        keys = self._model_keys(folder)
        wanted = model.get("use_as_default")
        out.common = {key: keys[key] for key in (wanted if isinstance(wanted, list) else ()) if key in keys}
        out.folder = folder
        keys |= self._adapters()
        for name, options in self._sampling().items():
            out.common[name] = keys[name] = options
        if _is_set(named := model.get("model_name")):
            if model.get("use_dummy_models") and isinstance(dummies := model.get("dummy_model_names"), list):
                keys["aliases"] = [str(name) for name in dummies]
            out.models.append(ForeignModel(str(named), folder / str(named), keys))
        self._note_the_rest()
        return out

    def _network(self, network: Mapping[str, Any]) -> None:
        host, port = str(network.get("host") or "127.0.0.1"), network.get("port") or 5000
        own, free = host in ("127.0.0.1", "localhost", "::1"), network.get("disable_auth") is True
        listen = f"[{host}]:{port}" if ":" in host else f"{'127.0.0.1' if host == 'localhost' else host}:{port}"
        self._out.gateway = {"listen": listen, "auth": "none" if free and own else "keys"}
        if not own:
            names = (
                "other machines may use the address; add names by which they call this one to `gateway.allowed_hosts`"
            )
            self._out.notes.append(f"network.host: {names}")
        if free and not own:
            why = "only programs of this machine may do without a token, at 127.0.0.1"
            self._out.notes.append(f"network.disable_auth: {why}; {TOKENS}")
        elif not free:
            self._out.notes.append(f"api_tokens.yml: {TOKENS}. The right `admin` stands for the admin key")

    def _model_keys(self, folder: Path) -> dict[str, Any]:
        problems: list[Problem] = []
        found = {key: value for key, value, _ in defaults_of(self._source, folder / "any", problems)}
        keys = {key: value for key, value in found.items() if _TABBY_DEFAULTS.get(key) != value}
        for problem in problems:
            if problem.path.startswith(("model.", "draft_model.")) and problem.path not in _TABBY_SILENT:
                self._out.notes.append(f"{problem.path}: {_TABBY_NOTES.get(problem.path, 'has no counterpart')}")
        split = keys.get("gpu_split")
        if isinstance(split, list) and len(split) > 1:
            keys["gpu"] = [*range(len(split))]
        draft = _map(self._data.get("draft_model"))
        if _is_set(named := draft.get("draft_model_name")):
            keys["draft_model"] = str(self._base / str(draft.get("draft_model_dir") or "models") / str(named))
        else:
            keys = {key: value for key, value in keys.items() if not key.startswith("draft_")}
        if draft.get("draft_mode") == "ngram":
            keys["ngram_draft"] = True
        if _map(self._data.get("model")).get("force_enable_thinking") is True:
            keys["template_kwargs"] = {"enable_thinking": True}
        if _is_set(template := _map(self._data.get("model")).get("prompt_template")):
            file = self._base / "templates" / f"{template}.jinja"
            keys["chat_template"] = str(file) if file.is_file() else str(template)
        return keys

    def _adapters(self) -> dict[str, Any]:
        lora = _map(self._data.get("lora"))
        folder, given = self._base / str(lora.get("lora_dir") or "loras"), lora.get("loras")
        adapters = [
            {"dir": str(folder / str(one["name"])), "scaling": one.get("scaling") or 1.0}
            for one in (given if isinstance(given, list) else ())
            if isinstance(one, dict) and "name" in one
        ]
        return {"lora": adapters} if adapters else {}

    def _sampling(self) -> dict[str, Any]:
        """Return the keys ``sampling`` and ``forced`` with the values of the preset, which count for options that
        requests leave out, or for all requests."""
        preset = _map(self._data.get("sampling")).get("override_preset")
        if not _is_set(preset):
            return {}
        file = self._base / "sampler_overrides" / f"{preset}.yml"
        try:
            overrides = _map(YamlSource(file).data)
        except Exception:  # missing or broken: the same advice
            self._out.notes.append(f"sampling.override_preset: {file} cannot be read; set `sampling` of the models")
            return {}
        found: dict[str, Any] = {}
        for name, entry in overrides.items():
            if isinstance(entry, dict) and _is_set(value := entry.get("override")):
                found.setdefault("forced" if entry.get("force") is True else "sampling", {})[name] = value
        return found

    def _note_the_rest(self) -> None:
        for section, values in self._data.items():
            if section in ("model", "draft_model"):
                continue  # ``defaults_of`` has read these
            for key, value in _map(values).items():
                path = f"{section}.{key}"
                if _is_set(value) and path not in _TABBY_SILENT:
                    self._out.notes.append(f"{path}: {_TABBY_NOTES.get(path, 'has no counterpart')}")


# --- llama-swap -------------------------------------------------------------------------------------------------------

_MACRO: Final = re.compile(r"\$\{([^}]+)\}")
_DEEPEST: Final = 10
"""How often macros within macros are replaced."""
_PATHS: Final = ("-m", "--model", "--model-path", "--model_path")
_CONTEXTS: Final = ("-c", "--ctx-size", "--max-model-len", "--max-seq-len", "--context-length")
_SLOTS: Final = ("-np", "--parallel", "--max-num-seqs", "--max-batch-size")
_CACHE_TYPES: Final = ("-ctk", "--cache-type-k", "--cache-mode")
_TEMPLATE_KWARGS: Final = ("--chat-template-kwargs", "--default-chat-template-kwargs")
_SAMPLING: Final = {
    "--temp": "temperature", "--temperature": "temperature", "--top-p": "top_p", "--top-k": "top_k",
    "--min-p": "min_p", "--repeat-penalty": "repetition_penalty", "--presence-penalty": "presence_penalty",
    "--frequency-penalty": "frequency_penalty",
}  # fmt: skip
_CMD_READ: Final = frozenset({
    *_PATHS, *_CONTEXTS, *_SLOTS, *_CACHE_TYPES, *_TEMPLATE_KWARGS, *_SAMPLING, "-hf", "--hf-repo", "--model-dir",
    "--model_dir", "--model-name", "--model_name", "--chat-template-file", "--chat-template",
})  # fmt: skip
"""Options of a command that become keys."""
_CMD_SILENT: Final = frozenset({
    "--host", "--port", "--no-webui", "--jinja", "-ngl", "--n-gpu-layers", "--gpu-layers", "-fa", "--flash-attn",
    "-ctv", "--cache-type-v", "--cont-batching", "-cb", "--metrics", "--slots", "--log-disable", "--alias", "-a",
    "--served-model-name", "--gpu-memory-utilization", "--disable-auth", "--disable-log-requests",
    "--init", "--rm", "--name", "-p", "--publish", "-v", "--volume", "--gpus", "--runtime", "--ipc", "-e", "--env",
    "-i", "-t", "-it", "--network", "--shm-size", "--user", "-u",
})  # fmt: skip
"""Options of a command, or of the container around it, that modelctl needs no counterpart for."""
_TOP_NOTES: Final = {
    "matrix": "name models that may not be loaded together in `groups`; models of a full GPU leave by themselves",
    "peers": "several supervisors stand behind one door with a proxy: see the page Several supervisors",
    "captureBuffer": "texts of requests are never kept; `modelctl story ID` tells how a request went",
    "apiKeys": TOKENS,
}
_MODEL_NOTES: Final = {
    "cmdStop": "nothing of your own is run: workers are stopped by the supervisor",
    "name": "models.yaml has no display names: use `aliases`",
    "metadata": "models.yaml has no metadata: write a comment",
    "aliases.unlisted": "an alias is listed if its model is: `listed: false` leaves out the model and all its aliases",
    "concurrencyLimit": "`max_batch_size` says how many requests run together, `max_queue` how many may wait",
    "filters.stripParams": "requests keep options for which `forced` has no value; write the values there",
}


def _llama_swap(source: YamlSource, environment: Mapping[str, str]) -> ForeignConfig:
    data = _map(source.data)
    keyed = _is_set(data.get("apiKeys"))
    out = ForeignConfig(LLAMA_SWAP, gateway={"listen": "127.0.0.1:8080", "auth": "keys" if keyed else "none"})
    out.notes.append("the command line's -listen: gateway.listen has its default; change it if you gave another")
    out.notes += [f"{key}: {what}" for key, what in _TOP_NOTES.items() if _is_set(data.get(key))]
    preload = _map(_map(data.get("hooks")).get("on_startup")).get("preload")
    at_start = {str(name) for name in preload} if isinstance(preload, list) else set()
    noted: dict[str, list[str]] = {}
    for name, entry in _map(data.get("models")).items():
        model = _SwapModel(str(name), _map(entry), data, environment, noted).read()
        if str(name) in at_start:
            model.keys["autostart"] = True
        out.models.append(model)
    tells = [_map(entry).get("sendLoadingState") for entry in _map(data.get("models")).values()]
    if data.get("sendLoadingState") is True or True in tells:
        out.gateway["progress"] = "reasoning"
        if any(isinstance(each, bool) and each is not data.get("sendLoadingState", False) for each in tells):
            out.notes.append("sendLoadingState of single models: `gateway.progress` holds for all models")
    for key, names in noted.items():
        what = "an option of cmd; see the page Configuration for what does the same"
        out.notes.append(f"{key} of {', '.join(names)}: {_MODEL_NOTES.get(key, what)}")
    _groups(data, out)
    return out


def _groups(data: Mapping[str, Any], out: ForeignConfig) -> None:
    names = {model.name: plain_name(model.name) for model in out.models}
    groups = _map(data.get("groups"))
    for group, entry in groups.items():
        members = [names[str(member)] for member in _map(entry).get("members") or () if str(member) in names]
        if members and _map(entry).get("swap", True):
            out.groups[plain_name(str(group))] = {"models": members, "loaded": 1}
        if _map(entry).get("persistent"):
            for model in out.models:
                if names[model.name] in members:
                    model.keys["pinned"] = True
        if _map(entry).get("exclusive", True):
            why = "other groups stay loaded here while the memory lasts: put their models into one group"
            out.notes.append(f"groups.{group}.exclusive: {why}")
    if not groups and not _is_set(data.get("matrix")) and len(out.models) > 1:
        line = f"groups: {{one: {{models: [{', '.join(names.values())}], loaded: 1}}}}"
        out.notes.append(
            f"models stay loaded beside others here while the memory lasts; for one at a time, add `{line}`"
        )


class _SwapModel:
    """One model of llama-swap's config.yaml.

    noted  keys without a counterpart → the models that have them
    """

    def __init__(
        self,
        name: str,
        entry: Mapping[str, Any],
        data: Mapping[str, Any],
        environment: Mapping[str, str],
        noted: dict[str, list[str]],
    ) -> None:
        self._name, self._entry, self._data = name, entry, data
        self._macros = {"MODEL_ID": name, **_map(data.get("macros")), **_map(entry.get("macros"))}
        self._environment = environment
        self._noted = noted

    def read(self) -> ForeignModel:
        entry = self._entry
        words = self._words(str(entry.get("cmd") or ""))
        model = ForeignModel(self._name, None, {"lazy": True})
        path = self._path(words)
        if path is None:
            model.why_not = "its cmd names no directory of a model; write `model_dir`"
        elif path.endswith(".gguf"):
            model.why_not = f"{path} is GGUF, which no engine here loads: get the model's EXL2 weights, and name them"
        elif path.startswith("hf:"):
            model.why_not = f"nothing is downloaded here: download {path[3:]}, and name its directory"
        else:
            model.model_dir = Path(path)
        model.keys |= self._options(words)
        options = dict.fromkeys(word.partition("=")[0] for word in words if re.match("--?[A-Za-z]", word))
        if model.model_dir is not None:
            for option in options:
                if option not in _CMD_READ and option not in _CMD_SILENT:
                    self._noted.setdefault(option, []).append(self._name)
        ttl = entry.get("ttl", -1)
        ttl = self._data.get("globalTTL", 0) if ttl == -1 else ttl
        if isinstance(ttl, int) and ttl > 0:
            model.keys["ttl"] = f"{ttl}s"
        aliases = entry.get("aliases")
        if isinstance(description := entry.get("description"), str) and description.strip():
            model.keys["description"] = description
        named = [str(one.get("id") if isinstance(one, dict) else one) for one in _list(aliases)]
        if named:
            model.keys["aliases"] = named
        if any(isinstance(one, dict) and one.get("unlisted") is True for one in _list(aliases)):
            self._noted.setdefault("aliases.unlisted", []).append(self._name)
        if entry.get("unlisted") is True:
            model.keys["listed"] = False
        self._filters(model)
        for key in _MODEL_NOTES:
            if _is_set(entry.get(key)):
                self._noted.setdefault(key, []).append(self._name)
        return model

    def _filled(self, text: str) -> str:
        """Return the text with its macros replaced. Unknown ones, and ${PORT}, stay."""

        def value(match: "re.Match[str]") -> str:
            name = match[1]
            if name.startswith("env."):
                return self._environment.get(name.removeprefix("env."), match[0])
            return str(self._macros.get(name, match[0]))

        for _ in range(_DEEPEST):
            filled = _MACRO.sub(value, text)
            if filled == text:
                break
            text = filled
        return text

    def _words(self, command: str) -> list[str]:
        lines = (line for line in self._filled(command).splitlines() if not line.lstrip().startswith("#"))
        try:
            words = shlex.split(" ".join(line.removesuffix("\\") for line in lines))
        except ValueError:  # quotes that do not end
            return []
        for at, word in enumerate(words[:-1]):
            if at and word == "-m" and re.search(r"python[\d.]*$", words[at - 1]):  # `python -m MODULE` names no model
                return words[at + 2 :]
        return words

    def _path(self, words: Sequence[str]) -> str | None:
        """Return the path of the model; "hf:ID" for one that is downloaded; None if the command names none."""
        if (repository := _value(words, ("-hf", "--hf-repo"))) is not None:
            return f"hf:{repository}"
        if (folder := _value(words, ("--model-dir", "--model_dir"))) is not None:
            return str(Path(folder) / (_value(words, ("--model-name", "--model_name")) or ""))
        path = _value(words, _PATHS)
        if path is None and "serve" in words[:-1]:  # vllm serve MODEL
            path = words[words.index("serve") + 1]
        if path is None:
            return None
        for outside, inside in _mounts(words):
            if path == inside or path.startswith(f"{inside}/"):
                return outside + path[len(inside) :]
        return path if path.startswith(("/", "~", ".")) or path.endswith(".gguf") or "/" not in path else f"hf:{path}"

    def _options(self, words: Sequence[str]) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        context, slots = _number(_value(words, _CONTEXTS)), _number(_value(words, _SLOTS))
        if slots:
            keys["max_batch_size"] = slots
        if context and slots and _value(words, ("-c", "--ctx-size")) is not None:
            keys |= {"max_seq_len": context // slots, "cache_size": context}  # llama-server divides it by its slots
        elif context:
            keys["max_seq_len"] = context
        if cache := _value(words, _CACHE_TYPES):
            keys["cache_mode"] = {
                "q8_0": "Q8",
                "q5_0": "Q6",
                "q5_1": "Q6",
                "q4_0": "Q4",
                "q4_1": "Q4",
                "f16": "FP16",
            }.get(cache.lower(), cache.upper())
        given = {ours: _number(_value(words, (theirs,))) for theirs, ours in _SAMPLING.items()}
        if sampling := {name: value for name, value in given.items() if value is not None}:
            keys["sampling"] = sampling
        template = _value(words, ("--chat-template-file", "--chat-template"))
        if template is not None and is_template_file(template):  # llama.cpp has templates of its own, with names
            keys["chat_template"] = template
        if template_kwargs := _object(_value(words, _TEMPLATE_KWARGS)):
            keys["template_kwargs"] = template_kwargs
        variables = self._entry.get("env")
        for variable in variables if isinstance(variables, list) else ():
            name, _, value = self._filled(str(variable)).partition("=")
            if name == "CUDA_VISIBLE_DEVICES" and re.fullmatch(r"\d+(,\d+)*", value):
                pins = [*map(int, value.split(","))]
                keys["gpu"] = pins if len(pins) > 1 else pins[0]
        return keys

    def _filters(self, model: ForeignModel) -> None:
        filters = _map(self._entry.get("filters"))
        options = _map(filters.get("setParams"))
        if forced := {key: value for key, value in options.items() if key != "chat_template_kwargs"}:
            model.keys["forced"] = forced
        if variables := _map(options.get("chat_template_kwargs")):
            model.keys["template_kwargs"] = model.keys.get("template_kwargs", {}) | variables
        variants = {}
        for name, entry in _map(filters.get("setParamsByID")).items():
            variant = self._filled(str(name)).rpartition(":")
            if variant[0] not in (self._name, plain_name(self._name)):
                continue
            given = dict(_map(entry))
            kwargs = given.pop("chat_template_kwargs", None)
            parts = {"forced": given, "template_kwargs": kwargs}
            variants[variant[2]] = {key: value for key, value in parts.items() if value}
        if variants:
            model.keys["variants"] = variants
        if _is_set(stripped := filters.get("stripParams") or filters.get("strip_params")):
            self._strip(model, [name.strip() for name in str(stripped).split(",")])

    def _strip(self, model: ForeignModel, names: Sequence[str]) -> None:
        """Force the values of the command for options that llama-swap takes out of requests. Note the other options."""
        sampling, forced = model.keys.get("sampling", {}), model.keys.get("forced", {})
        stripped = {name: sampling[name] for name in names if name in sampling and name not in forced}
        rest = {name: value for name, value in sampling.items() if name not in stripped}
        for key, options in (("sampling", rest), ("forced", stripped | forced)):
            if options:
                model.keys[key] = options
            else:
                model.keys.pop(key, None)
        if any(name not in model.keys.get("forced", {}) for name in names):
            self._noted.setdefault("filters.stripParams", []).append(self._name)


def _value(words: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the value of an option of a command, as ``--name value`` or ``--name=value``."""
    for at, word in enumerate(words):
        if word in names and at + 1 < len(words):
            return words[at + 1]
        option, equals, value = word.partition("=")
        if equals and option in names:
            return value
    return None


def _object(text: str | None) -> dict[str, Any]:
    """Return a JSON object in an option of a command; an empty one for anything else."""
    try:
        return _map(json.loads(text or ""))
    except (ValueError, RecursionError):
        return {}


def _number(text: str | None) -> Any:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text or "")
    return None


def _mounts(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (path outside, path inside) of each directory that a container gets."""
    for at, word in enumerate(words[:-1]):
        if word in ("-v", "--volume"):
            outside, _, inside = words[at + 1].partition(":")
            yield outside, inside.partition(":")[0]


def plain_name(name: str) -> str:
    """Return the name of a model or a group in models.yaml for a name in another program's file."""
    if re.fullmatch(MODEL_NAME_PATTERN, name):
        return name
    return re.sub(r"[^a-z0-9._-]+", "-", name.lower()).lstrip("._-")[:64] or "model"
