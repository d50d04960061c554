"""The engines by name. Nothing here imports torch: an engine's module is imported when the engine is built."""

import difflib
import importlib

from model_worker.engine import Engine, LoadError
from protocol.process.worker_spec import READ_TOKENIZERS, EngineSpec, install_command, missing_for, not_installed

BUILT_IN = {
    "transformers": "model_worker.engines.embedded.engine:TransformersEngine",
    "exllamav2": "model_worker.engines.exllamav2.engine:ExLlamaV2Engine",
    "embedding": "model_worker.engines.embedding.engine:EmbeddingEngine",
}


def build_engine(spec: EngineSpec) -> Engine:
    """Return the engine that ``spec.engine`` names: a key of BUILT_IN, or an import string "package.module:Class".

    The engine is constructed, not loaded. Raises LoadError for an unknown name, a module that cannot be imported, a
    missing class, unknown options of the engine, and a missing package that the engine needs.
    """
    check_installed(spec.engine)
    target = BUILT_IN.get(spec.engine, spec.engine)
    module_name, colon, class_name = target.partition(":")
    if not colon or not module_name or not class_name:
        near = difflib.get_close_matches(spec.engine, BUILT_IN, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(BUILT_IN)}, or package.module:Class"
        raise LoadError(f"unknown engine {spec.engine!r}: {hint}")
    try:
        module = importlib.import_module(module_name)
    except Exception as e:  # the import of a module may raise anything
        raise LoadError(f"engine {spec.engine!r} cannot be imported: {type(e).__name__}: {one_line(e)}") from e
    factory = getattr(module, class_name, None)
    if factory is None:
        raise LoadError(f"engine {spec.engine!r}: module {module_name} has no class {class_name}")
    engine: Engine = factory(spec)
    return engine


def check_installed(engine: str) -> None:
    """Raise LoadError, with the command that helps, if a package that the engine's worker imports is missing."""
    if (message := missing_for(engine)) is not None:
        raise LoadError(message, key="engine")


def not_checked(engine: str) -> str | None:
    """Return which parts of a model cannot be checked for lack of packages, and the remedy. Return None if all can be
    checked.

    A command may check a file for another machine, where the engine's packages are installed.
    """
    parts = []
    if packages := not_installed(READ_TOKENIZERS):
        parts.append(f"tokenizer and chat template (without {' and '.join(packages)})")
    if engine in ("transformers", "embedding") and not_installed(("transformers",)):
        parts.append("architecture (without transformers)")
    return f"{', '.join(parts)}: run {install_command('embedded')}" if parts else None


def one_line(error: BaseException) -> str:
    """Return the first line of an error that is not empty, because messages of libraries may be pages long."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
