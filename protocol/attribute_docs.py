"""Read the texts below attributes of classes, enums, TypedDicts and modules.

Python does not keep such texts at run time. So the class's own source is parsed with ``ast``.
"""

import ast
import inspect
import re
import sys
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any, is_typeddict


@cache
def attribute_docs(owner: type | ModuleType) -> MappingProxyType[str, str]:
    """Return {attribute: text below it}, without indentation. A class inherits the texts of its base classes."""
    bases = owner.__mro__[::-1] if isinstance(owner, type) else (owner,)
    extended = base_of(owner) if is_typeddict(owner) else None
    found = {} if extended is None else dict(attribute_docs(extended))
    for base in bases:
        found |= _own_docs(base)
    return MappingProxyType(found)


def base_of(map_type: Any) -> type | None:
    """Return the TypedDict that this one extends. Before Python 3.12 only the source shows which one that is."""
    found = re.match(r"class \w+\((\w+)\)", inspect.getsource(map_type))
    base = getattr(sys.modules[map_type.__module__], found.group(1), None) if found else None
    return base if is_typeddict(base) and base is not map_type else None


def _own_docs(owner: Any) -> dict[str, str]:
    try:
        source = inspect.getsource(owner)
    except (OSError, TypeError):  # object and int have no source
        return {}
    tree = ast.parse(inspect.cleandoc(source) if source[0].isspace() else source)
    body = tree.body[0].body if isinstance(owner, type) and isinstance(tree.body[0], ast.ClassDef) else tree.body
    found, name = {}, None
    for node in body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            if name is not None:
                found[name] = inspect.cleandoc(node.value.value)
            name = None
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
        else:
            name = None
    return found
