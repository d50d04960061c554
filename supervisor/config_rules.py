"""Find keys of a model in models.yaml that contradict each other, or that every request would violate. Pure."""

import difflib
from typing import Any

from protocol.process.worker_spec import PAGE_TOKENS
from supervisor.config_model import ENGINE_KEYS, ModelConfig
from supervisor.yaml_source import KeyPath


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
    if config.vram is not None:
        gpus = len(config.gpu) if isinstance(config.gpu, tuple) else 1
        if config.gpu in (None, "cpu"):
            problems.append(("vram", "is for a model on a GPU; add gpu, or remove it"))
        elif len(config.vram) not in (1, gpus):
            problems.append(("vram", f"has {len(config.vram)} values for {gpus} GPUs; give one, or one for each"))
    if config.engine == "exllamav2":
        problems += _exllamav2_problems(config)
    return problems


def sampling_problems(config: ModelConfig) -> list[tuple[KeyPath, str]]:
    """Return (path, message) for sampling defaults and limits with which every request would be refused.

    Those of the variants are included.
    """
    if config.sampling is None and config.limits is None and not config.variants:
        return []
    sampling, limits = config.sampling or {}, config.limits or {}
    problems = _defaults_problems((), sampling, {}, limits)
    for name, variant in config.variants.items() if not problems else ():
        path: KeyPath = ("variants", name)
        problems += _defaults_problems(path, variant.sampling or {}, sampling, limits)
        if variant.template_kwargs is not None:
            problems += _template_problems((*path, "template_kwargs"), variant.template_kwargs)
    return problems


def _defaults_problems(
    path: KeyPath, sampling: dict[str, Any], beneath: dict[str, Any], limits: dict[str, Any]
) -> list[tuple[KeyPath, str]]:
    """Return the first problem of a map of sampling defaults, and of the limits.

    path      the place of ``sampling`` in the model's entry
    beneath   the defaults that ``sampling`` replaces
    """
    # The import takes 0.1 s, and few models have these keys.
    from protocol.sampling_defaults import DefaultsProblem, check_limits, check_sampling

    place: KeyPath = (*path, "sampling")
    try:
        check_sampling(sampling)
        if path:  # of a variant: together with the model's own defaults, which are valid alone
            check_sampling({**beneath, **sampling})
        else:
            place = ("limits",)
        check_limits(limits, {**beneath, **sampling})  # the limits are compared with the defaults, which are valid now
    except DefaultsProblem as e:
        return [(place if e.key is None else (*place, e.key), e.problem)]
    return []


def _template_problems(path: KeyPath, variables: dict[str, Any]) -> list[tuple[KeyPath, str]]:
    """Return the problem of variables that no chat template could take."""
    from pydantic import ValidationError

    from protocol.chat import ChatFields, ChatMessage

    try:
        ChatFields(messages=(ChatMessage(role="user", content="x"),), template_kwargs=variables)
    except ValidationError as e:
        return [(path, e.errors(include_url=False)[0]["msg"].removeprefix("Value error, "))]
    return []


def _demand_problems(config: ModelConfig) -> list[tuple[str, str]]:
    """Return (key, message) for keys that only lazy models may have, and for keys that contradict each other."""
    given = {"ttl": config.ttl is not None, "pinned": config.pinned, "priority": config.priority != 0}
    why = "is for a model that a request can start: add lazy: true, or remove it"
    problems = [(key, why) for key, is_given in given.items() if is_given and not config.lazy]
    if config.pinned and config.ttl is not None:
        problems.append(("ttl", "unloads what pinned keeps loaded; keep one of them"))
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
    gpus = len(config.gpu) if isinstance(config.gpu, tuple) else 1
    for key in ("gpu_split", "autosplit_reserve"):
        value = getattr(config, key)
        if value is not None and gpus == 1:
            problems.append((key, "is for several GPUs; list them (gpu: [0, 1]), or remove it"))
        elif value is not None and len(value) != gpus:
            problems.append((key, f"has {len(value)} values for {gpus} GPUs; give one for each"))
    if config.autosplit_reserve is not None and (config.gpu_split is not None or config.tensor_parallel):
        other = "gpu_split" if config.gpu_split is not None else "tensor_parallel"
        problems.append(("autosplit_reserve", f"is for the automatic split, which {other} turns off; keep one of them"))
    if config.tensor_parallel:
        if gpus == 1:
            problems.append(("tensor_parallel", "needs several GPUs; list them (gpu: [0, 1]), or remove it"))
        if config.lora:
            problems.append(("lora", "does not work with tensor_parallel; remove one of them"))
    return problems
