"""The architectures that the transformers library can load as a causal language model.

The library's own table is in the module ``transformers.models.auto.modeling_auto``. Importing it takes torch and some
seconds. The table is a literal, so it is read from the module's source instead.
"""

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from pathlib import Path

from model_worker.engine import LoadError
from protocol.process.engine_packages import not_installed

_MODULE = "models/auto/modeling_auto.py"
_TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
NEEDED = frozenset({"position_ids", "attention_mask", "past_key_values"})
"""What the forward pass of a model must take, so that sequences of different lengths are computed together."""


def check_architecture(name: str) -> None:
    """Raise LoadError if the installed library has no causal language model of this name, or if the engine cannot step
    it.

    Without the library no architecture is known, and none is refused: ``engines.not_checked`` reports that.
    """
    if not_installed(("transformers",)):
        return
    known = causal_language_models()
    if name not in known:
        version = importlib.metadata.version("transformers")
        raise LoadError(f"architecture {name} is no causal language model known to transformers {version}")
    taken = _taken_by(name, known[name])
    if taken is not None and (missing := NEEDED - taken):
        raise cannot_step(name, missing)


def cannot_step(name: str, missing: Iterable[str]) -> LoadError:
    return LoadError(
        f"architecture {name} takes no {min(missing)}, so engine transformers cannot compute sequences of different "
        "lengths together: it is not supported"
    )


def causal_language_models() -> dict[str, frozenset[str]]:
    """Return the model types of the installed library by the names of their classes. Raises LoadError if they cannot be
    found."""
    source = _package() / _MODULE
    try:
        for node in ast.parse(source.read_bytes()).body:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [_TABLE]:
                assert isinstance(node.value, ast.Call)  # OrderedDict([(model type, name of the class), ...])
                types: dict[str, frozenset[str]] = {}
                for kind, name in dict(ast.literal_eval(node.value.args[0])).items():
                    types[name] = types.get(name, frozenset()) | {kind}
                return types
    except (OSError, SyntaxError, ValueError, TypeError, AssertionError, LookupError) as e:
        raise LoadError(
            f"{source} cannot be understood ({type(e).__name__}): install transformers 5", key="engine"
        ) from e
    raise LoadError(f"{source} has no {_TABLE}: install transformers 5", key="engine")


def _package() -> Path:
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        raise LoadError("the installed package transformers has no source: install transformers 5", key="engine")
    return Path(found.origin).parent


def _taken_by(name: str, types: Iterable[str]) -> frozenset[str] | None:
    """Return the parameters of a class's forward pass; None if its source is not where it is expected."""
    for kind in types:
        module = kind.replace("-", "_")
        try:
            tree = ast.parse((_package() / "models" / module / f"modeling_{module}.py").read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "forward":
                        return frozenset(each.arg for each in (*method.args.args, *method.args.kwonlyargs))
    return None
