"""Count the entries of every container that can be reached from an object, to find containers that grow."""

import gc
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

OURS = ("supervisor", "protocol", "model_worker")
_MAPS = (dict, OrderedDict, Counter)
_LINES = (list, tuple, set, frozenset, deque)


def entries(root: object) -> dict[str, int]:
    """Return the number of container entries for each ``Class.attribute``, summed over all instances.

    Entries of nested containers are included. The entries of tuples are searched but not counted. ``objects`` is the
    number of objects that the garbage collector tracks and that were created after ``gc.freeze``.
    """
    found: Counter[str] = Counter()
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("", root)]
    while todo:
        name, thing = todo.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, _MAPS):
            found[name] += len(thing)
            todo += [(name, part) for pair in thing.items() for part in pair]
        elif isinstance(thing, _LINES):
            found[name] += 0 if isinstance(thing, tuple) else len(thing)
            todo += [(name, part) for part in thing]
        else:
            todo += _attributes(name, thing)
    gc.collect()
    return {**found, "objects": len(gc.get_objects())}


def _attributes(name: str, thing: object) -> Iterator[tuple[str, object]]:
    match thing:
        case MethodType():
            yield name, thing.__self__
        case partial():
            yield name, thing.args
            yield name, thing.func
        case FunctionType():
            yield from ((name, cell) for cell in thing.__closure__ or ())
        case CellType():
            yield from ((name, part) for part in gc.get_referents(thing))
        case type():
            return
        case _ if type(thing).__module__.partition(".")[0] in OURS:
            names = {*getattr(thing, "__dict__", ()), *(s for c in type(thing).__mro__ for s in _slots(c))}
            for attribute in names:
                if hasattr(thing, attribute):
                    yield f"{type(thing).__name__}.{attribute}", getattr(thing, attribute)


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
