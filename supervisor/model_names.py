"""Find the model that a name means: a model, one of its aliases, or a variant of it (``name:variant``). Pure.

Every request, question and order passes here. So the command line, the clients and the gateway know the same names, and
a key's rights are those for the model itself. To a key that may not use a model, its other names mean nothing: the
answer is the one for a name that does not exist.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from protocol.codec import pack_body
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.limits import GATEWAY_NAME, SUPERVISOR_NAME
from protocol.unknown_models import nearest, unknown_model
from supervisor.config_model import ModelConfig, VariantConfig

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
