"""Find keys in models.yaml that contradict each other, or that every request would violate. Pure."""

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from protocol.codec import pack_body
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.limits import GATEWAY_NAME, MODEL_NAME_PATTERN, SUPERVISOR_NAME
from protocol.names import nearest, unknown_model
from protocol.process.worker_spec import OFF, PAGE_TOKENS
from supervisor.config.models import ENGINE_KEYS, ModelConfig, VariantConfig, marked
from supervisor.config.reading import AUTO
from supervisor.config.server import ClusterConfig, GroupConfig, HeldConfig
from supervisor.config.yaml_source import KeyPath

NO_SLEEP = "a worker that sleeps on another machine would keep its lease of the GPU"
_SEVERAL = "list them (gpu: [0, 1]), or write gpu: auto with gpus: 2"


def combination_problems(config: ModelConfig) -> list[tuple[str, str]]:
    """Return (key, message) for keys that are valid alone but contradict each other."""
    problems = []
    custom = ":" in config.engine
    if not custom and config.engine not in ENGINE_KEYS:
        near = difflib.get_close_matches(config.engine, ENGINE_KEYS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(ENGINE_KEYS)}, or package.module:Class"
        problems.append(("engine", f"{config.engine!r} is no engine: {hint}"))
        return problems
    known = ENGINE_KEYS.get(config.engine, frozenset())
    foreign = sorted(frozenset[str]().union(*ENGINE_KEYS.values()) - known)
    message = f"is not a key of engine {config.engine!r}; remove it"
    problems += [(key, message) for key in foreign if getattr(config, key) is not None]
    if config.engine == "embedding":
        text = (key for key in marked(ModelConfig, "text") if getattr(config, key) != getattr(ModelConfig, key))
        problems += [(key, "is for models that write text; remove it") for key in text]
    if config.options is not None and not custom:
        problems.append(("options", "is only for an engine named by an import string; remove it"))
    problems += _demand_problems(config)
    if config.engine == "exllamav2" and config.gpu in (None, "cpu"):
        problems.append(
            ("gpu", "engine exllamav2 needs a GPU: add gpu: auto, or pin it with gpu: 0, [0, 1] or GPU-<uuid>")
        )
    if config.gpus > 1:
        if config.gpu != "auto":
            problems.append(("gpus", "is for gpu: auto; list the GPUs in gpu instead, or write gpu: auto"))
        elif not custom and config.engine != "exllamav2":
            problems.append(("gpus", f"is {config.gpus}, and engine {config.engine} uses one GPU; remove it"))
    if config.vram is not None:
        gpus = config.gpu_count
        if not gpus:
            problems.append(("vram", "is for a model on a GPU; add gpu, or remove it"))
        elif len(config.vram) not in (1, gpus):
            problems.append(("vram", f"has {len(config.vram)} values for {gpus} GPUs; give one, or one for each"))
    if config.engine == "exllamav2":
        problems += _exllamav2_problems(config)
    return problems


def is_template_file(chat_template: str) -> bool:
    """Return whether the key ``chat_template`` means a file, and not a name in tokenizer_config.json."""
    return "/" in chat_template or chat_template.endswith(".jinja")


def cluster_problems(models: Mapping[str, ModelConfig], cluster: ClusterConfig | None) -> Iterator[tuple[KeyPath, str]]:
    """Yield (path, message) for models on other machines without a cluster, and for keys that do not work there."""
    if cluster is not None and cluster.advertise is None:
        yield ("cluster",), "needs advertise, the endpoint to which workers on other machines connect"
    if cluster is not None and cluster.model_store.listen is not None:
        store = cluster.model_store
        if store.listen == cluster.advertise:
            yield ("cluster", "model_store", "listen"), f"is {store.listen}, as advertise is; choose another port"
        if not store.directory.startswith(("/", "~/")):
            message = f"is {store.directory!r}: must be an absolute path, or begin with ~/"
            yield ("cluster", "model_store", "directory"), message
    for name, config in models.items():
        if config.node is None:
            continue
        if cluster is None:
            yield ("models", name, "node"), f"is {config.node!r}, and models.yaml has no section cluster; add one"
        if config.node == AUTO and not config.gpu_count:
            why = "is auto for a model on the CPU, for which the supervisor's own machine always has room: remove it"
            yield ("models", name, "node"), f"{why}, or write others"
        for key in ("sleep_after", "sleep_cache"):
            if config.node != AUTO and getattr(config, key) is not None:
                yield ("models", name, key), f"is for the supervisor's own machine: {NO_SLEEP}; remove it, or write ttl"
        if config.gpu not in (None, "cpu", "auto"):
            remedy = "write auto (and gpus: 2 for two of them) or cpu"
            yield ("models", name, "gpu"), f"is {config.gpu!r} with node: Ray chooses the GPUs there; {remedy}"


def sampling_problems(config: ModelConfig) -> list[tuple[KeyPath, str]]:
    """Return (path, message) for sampling defaults, forced values, limits and variables of the template with which
    every request would be refused.

    Those of the variants are included.
    """
    given = (config.sampling, config.forced, config.limits, config.variants or None, config.template_kwargs or None)
    if all(part is None for part in given):
        return []
    limits = config.limits or {}
    problems = _defaults_problems((), config, None, limits)
    beneath = config.template_kwargs or {}
    problems += _template_problems(("template_kwargs",), beneath)
    for name, variant in config.variants.items() if not problems else ():
        path: KeyPath = ("variants", name)
        problems += _defaults_problems(path, variant, config, limits)
        if variant.template_kwargs is not None:  # together with the model's own, which are valid alone
            problems += _template_problems((*path, "template_kwargs"), {**beneath, **variant.template_kwargs})
    return problems


def held_problems(held: HeldConfig) -> Iterator[tuple[KeyPath, str]]:
    """Yield (path, message) for limits of held events that a narrower limit exceeds."""
    for narrow, wide in (("stream", "client"), ("client", "all")):
        less, more = getattr(held, narrow), getattr(held, wide)
        if less > more:
            message = f"is {less} bytes, and supervisor.held.{wide} is {more}: make {narrow} smaller or {wide} larger"
            yield ("supervisor", "held", narrow), message


def group_problems(
    models: Mapping[str, ModelConfig], groups: Mapping[str, GroupConfig]
) -> Iterator[tuple[KeyPath, str]]:
    """Yield (path, message) for groups that name no models, and for groups whose models could never be loaded."""
    for name, group in groups.items():
        path: KeyPath = ("groups", name)
        if not re.fullmatch(MODEL_NAME_PATTERN, name):
            yield path, "is no name of a group: use a to z, 0 to 9, '.', '_' and '-', at most 64"
        if not group.models:
            yield (*path, "models"), "names no model; add at least two, or remove the group"
        for index, model in enumerate(group.models):
            if model not in models:
                near = difflib.get_close_matches(model, models, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(models)}"
                yield (*path, "models", index), f"is {model!r}: no model of this file has that name; {hint}"
            elif model in group.models[:index]:
                yield (*path, "models", index), f"is {model!r}, which the group has already; remove one"
        yield from _crowd_problems(path, group, {model: models[model] for model in group.models if model in models})


def _crowd_problems(
    path: KeyPath, group: GroupConfig, members: Mapping[str, ModelConfig]
) -> Iterator[tuple[KeyPath, str]]:
    """Yield (path, message) if models of a group would keep others from being loaded for ever."""
    starting = [m for m, c in members.items() if (not c.lazy if c.autostart is None else c.autostart)]
    staying = [m for m, c in members.items() if c.pinned or (not c.lazy and m in starting)]
    at_once = f"{group.loaded} of {len(members)} models may be loaded at once"
    remedy = "make them lazy without pinned, or raise loaded"
    if len(staying) >= group.loaded and len(members) > len(staying):
        others = ", ".join(m for m in members if m not in staying)
        message = f"{at_once}, and {', '.join(staying)} would never be unloaded for {others}: {remedy}"
        yield (*path, "loaded"), message
    elif len(staying) > group.loaded:
        yield (*path, "loaded"), f"{at_once}, and none of {', '.join(staying)} would ever be unloaded: {remedy}"
    elif len(starting) > group.loaded:
        message = f"{at_once}, and {', '.join(starting)} start with the supervisor: remove autostart, or raise loaded"
        yield (*path, "loaded"), message


def _defaults_problems(
    path: KeyPath, own: ModelConfig | VariantConfig, model: ModelConfig | None, limits: dict[str, Any]
) -> list[tuple[KeyPath, str]]:
    """Return the first problem of maps of sampling defaults and forced values, and of the limits.

    path   the place of the maps in the model's entry
    own    has the maps
    model  the model of a variant, whose maps are replaced by the names; None for the model itself
    """
    # Few models have these keys, and a start waits for no module that it may never need.
    from protocol.sampling_defaults import DefaultsProblem, check_forced, check_limits, check_sampling

    sampling, forced = own.sampling or {}, own.forced or {}
    beneath, forced_beneath = (model.sampling or {}, model.forced or {}) if model is not None else ({}, {})
    place: KeyPath = (*path, "sampling")
    try:
        check_sampling(sampling)
        check_sampling({**beneath, **sampling})  # of a variant: together with the model's own, which are valid alone
        place = (*path, "forced")
        whole = {**beneath, **sampling, **forced_beneath}
        check_forced(forced, whole)
        place = (*path, "sampling") if path else ("limits",)
        check_limits(limits, {**whole, **forced})  # the limits are compared with the values, which are valid now
    except DefaultsProblem as e:
        return [(place if e.key is None else (*place, e.key), e.problem)]
    return []


def _template_problems(path: KeyPath, variables: dict[str, Any]) -> list[tuple[KeyPath, str]]:
    """Return the problem of variables that no chat template could take."""
    from protocol.chat import check_variables

    try:
        check_variables(variables)
    except ValueError as e:
        return [(path, str(e))]
    return []


def _demand_problems(config: ModelConfig) -> list[tuple[str, str]]:
    """Return (key, message) for keys that only lazy models may have, and for keys that contradict each other."""
    given = [key for key in marked(ModelConfig, "lazy") if getattr(config, key) != getattr(ModelConfig, key)]
    why = "is for a model that a request can start: add lazy: true, or remove it"
    problems = [(key, why) for key in given if not config.lazy]
    if config.pinned and config.ttl is not None:
        problems.append(("ttl", "unloads what pinned keeps loaded; keep one of them"))
    if config.sleep_after is not None and config.sleep == OFF:
        problems.append(("sleep_after", "puts a model to sleep, which sleep: off forbids; keep one of them"))
    if config.sleep_after is not None and config.pinned:
        problems.append(("sleep_after", "puts to sleep what pinned keeps on the GPU; keep one of them"))
    if config.sleep_after is not None and config.ttl is not None and config.ttl <= config.sleep_after:
        problems.append(("sleep_after", "is not shorter than ttl, which unloads the model; make it shorter"))
    if config.pinned and config.priority:
        problems.append(
            ("priority", "orders which models are unloaded first, and a pinned one never is; keep one of them")
        )
    return problems


def _exllamav2_problems(config: ModelConfig) -> list[tuple[str, str]]:
    """Return (key, message) for keys of engine exllamav2 that contradict each other."""
    problems = []
    for key in ("cache_size", "chunk_size"):
        value = getattr(config, key)
        if value is not None and value % PAGE_TOKENS:
            near = -(-value // PAGE_TOKENS) * PAGE_TOKENS
            problems.append((key, f"is {value}: must be a multiple of {PAGE_TOKENS}, such as {near}"))
    if config.draft_model is not None and config.ngram_draft:
        problems.append(("ngram_draft", "speculates as draft_model does; keep one of them"))
    if config.draft_model is None:
        alone = ("draft_cache_mode", "draft_rope_scale", "draft_rope_alpha")
        problems += [(key, "is for a draft_model; add one, or remove it") for key in alone if getattr(config, key)]
        if config.draft_tokens and not config.ngram_draft:
            problems.append(("draft_tokens", "is without effect: add draft_model or ngram_draft, or remove it"))
    gpus = config.gpu_count or 1
    for key in ("gpu_split", "autosplit_reserve"):
        value = getattr(config, key)
        if value is not None and gpus == 1:
            problems.append((key, f"is for several GPUs: {_SEVERAL}, or remove it"))
        elif value is not None and len(value) != gpus:
            problems.append((key, f"has {len(value)} values for {gpus} GPUs; give one for each"))
    if config.autosplit_reserve is not None and (config.gpu_split is not None or config.tensor_parallel):
        other = "gpu_split" if config.gpu_split is not None else "tensor_parallel"
        problems.append(("autosplit_reserve", f"is for the automatic split, which {other} turns off; keep one of them"))
    if config.tensor_parallel:
        if gpus == 1:
            problems.append(("tensor_parallel", f"needs several GPUs: {_SEVERAL}, or remove it"))
        if config.lora:
            problems.append(("lora", "does not work with tensor_parallel; remove one of them"))
    return problems


# Find the model that a name means: a model, one of its aliases, or a variant of it (``name:variant``). Pure.
#
# Every request, question and order passes here. So the command line, the clients and the gateway know the same names,
# and a key's rights are those for the model itself. To a key that may not use a model, its other names mean nothing:
# the answer is the one for a name that does not exist.


_ALIAS: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")
_VARIANT: Final = re.compile(r"[a-z][a-z0-9._-]{0,63}")
"""A variant begins with a letter, because ``letters:2`` is the second worker of ``letters``."""
_WORKER: Final = re.compile(r"[1-9][0-9]?")
NO_VARIANT: Final = VariantConfig()
MOST_NAMES: Final = 64
"""Most aliases, and most variants, of one model. Every answer of GET /v1/models lists all of them."""


@dataclass(frozen=True, slots=True)
class Named:
    """What a name means.

    model            the name of the model. For a name that nothing has, the name itself
    defaults         a packed map with the variant's ``sampling`` and ``forced``, and with the ``template_kwargs`` of
                     the model and of the variant. It goes to the worker with the job. Empty if none is set
    template_kwargs  the variables of the chat template among these settings
    """

    model: str
    defaults: bytes = b""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class ModelNames:
    """All names of the models of one models.yaml.

    default  the name that stands for a request without a model; None if such requests are refused
    """

    def __init__(self, models: Mapping[str, ModelConfig], default: str | None = None) -> None:
        self.default = default
        self._models = models
        self._named: dict[str, Named] = {}
        self._unlisted: set[str] = set()
        for model, config in models.items():
            for name in (model, *config.aliases):
                self._add(name, model, config, NO_VARIANT)
                for variant, settings in config.variants.items():
                    self._add(f"{name}:{variant}", model, config, settings)

    def _add(self, name: str, model: str, config: ModelConfig, variant: VariantConfig) -> None:
        self._named[name] = _named(model, config, variant)
        shown = config.listed if variant.listed is None else variant.listed
        of_alias = name != model and not name.startswith(f"{model}:")  # one that is not listed shows in no name
        if not shown or (of_alias and not config.listed):
            self._unlisted.add(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._named)

    def __contains__(self, name: str) -> bool:
        return name in self._named

    def describe(self, model: str) -> dict[str, Any]:
        """Return the other names of a model, and its description, as clients see them. A model that is being removed
        has none of these any more.

        "unlisted" has those of its names that lists for clients leave out, see the key ``listed``.
        """
        config = self._models.get(model)
        variants = [] if config is None else list(config.variants)
        names = [] if config is None else [model, *config.aliases, *(f"{model}:{variant}" for variant in variants)]
        return {
            "aliases": [] if config is None else config.aliases,
            "variants": variants,
            "unlisted": [name for name in names if name in self._unlisted],
            "default": self.default if self.default and self.find(self.default).model == model else None,
            "description": None if config is None else config.description,
        }

    def unknown(self, name: str, may_use: Callable[[str], bool]) -> WireError:
        """Return the error for a name that nothing has. It names only what is listed and the sender may use.

        may_use  tells whether the sender may use a model
        """
        return unknown_model(name, self._listed_models(may_use), self._others(may_use))

    def nearest(self, name: str, may_use: Callable[[str], bool]) -> str | None:
        """Return the listed name that is most like a wrong one, among those that the sender may use. None if none is
        like it."""
        return nearest(name, chain(self._listed_models(may_use), self._others(may_use)))

    def _listed_models(self, may_use: Callable[[str], bool]) -> Iterator[str]:
        """Yield the listed models that the sender may use."""
        return (model for model in self._models if model not in self._unlisted and may_use(model))

    def _others(self, may_use: Callable[[str], bool]) -> Iterator[str]:
        """Yield the listed aliases and variants of the models that the sender may use."""
        others = (name for name in self._named if name not in self._models and name not in self._unlisted)
        return (name for name in others if may_use(self._named[name].model))

    def find(self, name: str) -> Named:
        """Return what a name means. A name that nothing has is returned as it is, and the caller refuses it."""
        return self._named.get(name) or Named(name)

    def find_or_default(self, name: str, may_use: Callable[[str], bool]) -> Named:
        """Return what the name in a request means. The empty name is the default model.

        may_use  tells whether the sender may use a model

        A name of a model that the sender may not use is returned as it is, as one that nothing has. Raises RequestError
        for an empty name if there is no default model that the sender may use.
        """
        if name:
            named = self.find(name)
            return named if may_use(named.model) else Named(name)
        default = None if self.default is None else self.find(self.default)
        if default is None or not may_use(default.model):
            message = "the request names no model, and models.yaml has no default_model for it: name a model"
            raise RequestError(message, field="model", code=ErrorCode.INVALID_REQUEST)
        return default


def _named(model: str, config: ModelConfig, variant: VariantConfig = NO_VARIANT) -> Named:
    variables = {**(config.template_kwargs or {}), **(variant.template_kwargs or {})}
    given = {"sampling": variant.sampling, "forced": variant.forced, "template_kwargs": variables}
    settings = {key: value for key, value in given.items() if value}
    return Named(model, pack_body(settings) if settings else b"", variables)


def name_problems(
    models: Mapping[str, ModelConfig], default: str | None
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield (path of the key in models.yaml, message) for each name that cannot be used."""
    taken = dict.fromkeys(models, "the name of a model")
    for model, config in models.items():
        for name in (model, *config.aliases):
            taken |= {f"{name}:{variant}": f"the variant {variant} of {model}" for variant in config.variants}
    for model, config in models.items():
        path = ("models", model)
        for index, alias in enumerate(config.aliases):
            if problem := _alias_problem(alias, models, taken):
                yield (*path, "aliases", index), problem
            taken.setdefault(alias, f"an alias of {model}")
        for variant in config.variants:
            if not _VARIANT.fullmatch(variant):
                rule = "use a to z, 0 to 9, '.', '_' and '-', at most 64, starting with a letter"
                yield (*path, "variants", variant), f"is no name of a variant: {rule}"
        for key, names in (("aliases", config.aliases), ("variants", config.variants)):
            if len(names) > MOST_NAMES:
                yield (*path, key), f"has {len(names)} names: at most {MOST_NAMES}"
    if default is not None and default not in ModelNames(models):
        rule = "must be a model, an alias, or a variant of this file; name one, or add it to a model's aliases"
        yield ("default_model",), f"is {default!r}: {rule}"


def is_alias(name: str) -> bool:
    """Return whether a name has the form of an alias, and means no log of the supervisor."""
    return bool(_ALIAS.fullmatch(name)) and name not in (SUPERVISOR_NAME, GATEWAY_NAME)


def _alias_problem(alias: str, models: Mapping[str, ModelConfig], taken: Mapping[str, str]) -> str | None:
    if not _ALIAS.fullmatch(alias):
        rule = "use letters, digits, '.', '_', '-', '/' and ':', at most 128, starting with a letter or digit"
        return f"is {alias!r}: {rule}"
    if alias in (SUPERVISOR_NAME, GATEWAY_NAME):
        return f"is taken: the {alias}'s own log is called so"
    if alias in taken:
        return f"is {alias!r}, which is {taken[alias]} already: choose another name"
    name, _, number = alias.partition(":")
    if name in models and _WORKER.fullmatch(number):
        return f"is {alias!r}, which stands for a worker of {name}: choose another name"
    return None
