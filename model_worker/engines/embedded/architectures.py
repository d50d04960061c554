"""The architectures that the transformers library can load as a causal language model.

The library's own table is in the module ``transformers.models.auto.modeling_auto``. Importing it takes torch and some
seconds. The table is a literal, so it is read from the module's source instead.
"""

import ast
import importlib.metadata
import importlib.util
from pathlib import Path

from model_worker.engine import LoadError
from protocol.process.engine_packages import not_installed

_MODULE = "models/auto/modeling_auto.py"
_TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def check_architecture(name: str) -> None:
    """Raise LoadError if the installed library has no causal language model of this name.

    Without the library no architecture is known, and none is refused: ``engines.not_checked`` reports that.
    """
    if not_installed(("transformers",)):
        return
    known = causal_language_models()
    if name not in known:
        version = importlib.metadata.version("transformers")
        raise LoadError(f"architecture {name} is no causal language model known to transformers {version}")


def causal_language_models() -> frozenset[str]:
    """Return the class names of the installed library. Raises LoadError if they cannot be found."""
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        raise LoadError("the installed package transformers has no source: install transformers 5", key="engine")
    source = Path(found.origin).parent / _MODULE
    try:
        for node in ast.parse(source.read_bytes()).body:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [_TABLE]:
                assert isinstance(node.value, ast.Call)  # OrderedDict([(model type, name of the class), ...])
                return frozenset(dict(ast.literal_eval(node.value.args[0])).values())
    except (OSError, SyntaxError, ValueError, TypeError, AssertionError, LookupError) as e:
        raise LoadError(
            f"{source} cannot be understood ({type(e).__name__}): install transformers 5", key="engine"
        ) from e
    raise LoadError(f"{source} has no {_TABLE}: install transformers 5", key="engine")
