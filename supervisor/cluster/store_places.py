"""The directories that an engine reads, on the supervisor's machine and on others. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from protocol.process.worker_spec import EngineSpec


def directories_of(engine: EngineSpec) -> list[str]:
    """Return the directories that an engine reads, each once."""
    options = engine.options
    found = [engine.model_dir, *([options["draft_model"]] if options.get("draft_model") else [])]
    return list(dict.fromkeys([*found, *(adapter["dir"] for adapter in options.get("lora") or ())]))


def moved(engine: EngineSpec, places: Mapping[str, str]) -> EngineSpec:
    """Return the specification of an engine with other places of its directories."""
    options = dict(engine.options)
    if options.get("draft_model"):
        options["draft_model"] = places[options["draft_model"]]
    if options.get("lora"):
        options["lora"] = [{**adapter, "dir": places[adapter["dir"]]} for adapter in options["lora"]]
    return replace(engine, model_dir=places[engine.model_dir], options=options)
