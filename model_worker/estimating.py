"""A process of its own that says what models will take of GPUs: ``python -P -m model_worker.estimating PARENT``.

A model's directory may be hostile, huge, or on a file system that hangs: the supervisor reads none of it itself. Reads
from stdin a JSON list of {"spec": fields of EngineSpec, "counts": [numbers of GPUs]}, and writes one line of JSON for
each, in that order: {"needs": {count: {"weights", "cache", "draft", "workspace", "per_gpu"}}} in bytes,
{"error": text} for a model that cannot be loaded as configured, or {"unknown": text} where nobody can tell.
"""

import json
import resource
import sys
from dataclasses import asdict
from typing import Any

from model_worker.parent_death import die_with

MEMORY_LIMIT = 2 << 30
"""Bytes of address space: a safetensors header of the format's own limit, 100 MiB, takes 1 GiB as objects."""


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request."""
    from model_worker.engine import LoadError
    from model_worker.engines.exllamav2.vram import estimate
    from model_worker.engines.vetting import understood
    from protocol.worker_spec import EngineSpec

    spec = EngineSpec(**request["spec"])
    if spec.engine != "exllamav2":
        return {"unknown": f"there is no estimate for engine {spec.engine}"}
    try:
        with understood(spec.model_dir):
            return {"needs": {count: asdict(estimate(spec, count)) for count in request["counts"]}}
    except LoadError as e:
        return {"error": _one_line(str(e))}
    except MemoryError:
        return {"error": f"{spec.model_dir}: reading it takes more than {MEMORY_LIMIT >> 30} GiB of memory"}


def _one_line(text: str) -> str:
    """Names of files may hold anything; this ends on terminals."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:2000]


def main() -> None:
    if not die_with(int(sys.argv[1])):
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for request in json.load(sys.stdin):
        print(json.dumps(answer(request)), flush=True)


if __name__ == "__main__":
    main()
