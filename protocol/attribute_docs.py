"""Read the texts below attributes of dataclasses, pydantic models, enums and modules.

Python does not keep such texts at run time. So the class's own source is parsed with ``ast``, as pydantic does for
``use_attribute_docstrings``.
"""

import ast
import inspect
from functools import cache
from types import MappingProxyType, ModuleType
from typing import Any


@cache
def attribute_docs(owner: type | ModuleType) -> MappingProxyType[str, str]:
    """Return {attribute: text below it}, without indentation. A class inherits the texts of its base classes."""
    bases = owner.__mro__[::-1] if isinstance(owner, type) else (owner,)
    found: dict[str, str] = {}
    for base in bases:
        found |= _own_docs(base)
    return MappingProxyType(found)


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
