"""The names under which clients reach a model of the reply to the verb "models"."""

from collections.abc import Mapping, Sequence
from typing import Any

from protocol.errors import WireError
from protocol.unknown_models import unknown_model


def names_of(model: Mapping[str, Any]) -> list[str]:
    """Return the names of a model: its own, its aliases, and its variants as ``NAME:VARIANT``.

    model  an entry of ``models`` in the reply. A supervisor of an older version names no aliases and no variants
    """
    name = model["name"]
    return [name, *model.get("aliases", ()), *(f"{name}:{variant}" for variant in model.get("variants", ()))]


def listed_names_of(model: Mapping[str, Any]) -> list[str]:
    """Return the names of a model that lists for people and programs show. models.yaml may leave out some or all."""
    unlisted = model.get("unlisted", ())
    return [name for name in names_of(model) if name not in unlisted]


def means(model: Mapping[str, Any], name: str) -> bool:
    """Return whether a name means this model. A variant may stand behind an alias, too."""
    known = (model["name"], *model.get("aliases", ()))
    base, _, variant = name.rpartition(":")  # an alias may have a colon of its own
    return name in known or (base in known and variant in model.get("variants", ()))


def unknown_among(models: Sequence[Mapping[str, Any]], name: str) -> WireError:
    """Return the error for a name that none of these models has. It suggests listed names only. The supervisor tells
    only of models that the key may use.

    models  ``models`` in the reply
    """
    listed = [name for model in models for name in listed_names_of(model)]
    own = {model["name"] for model in models}
    return unknown_model(name, own.intersection(listed), (other for other in listed if other not in own))
