"""The error for a name that no model has. It says which name was probably meant.

The caller passes only names that the sender may use. So the error tells a key nothing about models that are hidden from
the key.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Final

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
