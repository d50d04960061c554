"""The error for a name that no model has. It says which name was probably meant.

The caller passes only names that the sender may use. So the error tells a key nothing about models that are hidden from
the key.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from protocol.errors import ErrorCode, WireError

MOST_CHARACTERS: Final = 64
"""Characters of a wrong name that is compared with others. The time for a comparison grows with their square, and the
supervisor compares on the thread of its loop."""
MOST_COMPARED: Final = 50
"""Names with which a wrong name is compared. Fifty names of 45 characters take 1.5 ms, ten short ones 0.15 ms."""
_SHOWN: Final = 64


def unknown_model(name: str, models: Iterable[str], others: Iterable[str] = ()) -> WireError:
    """Return the error MODEL_NOT_FOUND for a name that nothing has.

    models  the models that the sender may use
    others  their other names: aliases and variants
    """
    known = sorted(models)
    meant = nearest(name, [*known, *others])
    hint = f": there is {', '.join(known) or 'none'}" if meant is None else f"; did you mean {meant!r}?"
    return WireError(ErrorCode.MODEL_NOT_FOUND, f"no model {name[:_SHOWN]!r} is configured{hint}", field="model")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like a wrong one; None if none is like it."""
    from difflib import get_close_matches  # only after a mistake, as commands have to answer at once

    if len(name) > MOST_CHARACTERS:
        return None
    return next(iter(get_close_matches(name, list(islice(known, MOST_COMPARED)), n=1)), None)


# The names under which clients reach a model of the reply to the verb "models".


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
