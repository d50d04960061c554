"""Find keys in models.yaml that contradict each other, or that every request would violate. Pure."""

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from protocol.limits import MODEL_NAME_PATTERN
from protocol.process.worker_spec import OFF, PAGE_TOKENS
from supervisor.config_model import ENGINE_KEYS, ModelConfig, VariantConfig, marked
from supervisor.config_schema import ClusterConfig, GroupConfig, HeldConfig
from supervisor.workers.machines import AUTO
from supervisor.yaml_source import KeyPath

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
