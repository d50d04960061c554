"""Find the models of a models.yaml that cannot be loaded, for commands that start nothing.

A separate process (``estimates``) makes the checks that the model's worker makes before it loads. A fault of this
machine (a missing GPU or package) is marked as such, because a file may be checked where it is not used later.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from supervisor.config import Examined, ModelSpec
from supervisor.placement.estimates import Estimated, Fault, ask_now
from supervisor.placement.gpu_reader import read_once
from supervisor.placement.gpu_requests import answer_with, gpu_request_of, question_of
from supervisor.placement.gpu_shares import Split
from supervisor.placement.gpus import Gpu, GpusUnknown
from supervisor.placement.policy import GpuRequest, Placed, PlacementRefused, place, rooms
from supervisor.yaml_source import Problem

CONTEXT: Final = 16384
"""Tokens of context that a model gets if it has more, and nobody has said how many. The cache grows with the context:
the 131072 tokens of a Llama 3.1 8B take 16 GiB, more than its weights in EXL2."""


def vet_models(models: Mapping[str, ModelSpec], *, installed: bool, templates: bool = False) -> dict[str, Estimated]:
    """Return the faults of each model, or else the memory that it needs. Raises OSError if no process can be started.

    installed  whether it is a fault that the packages of an engine that may run on this machine are not installed here
    templates  whether the chat templates are to be tried
    """
    questions = {
        name: question_of(spec, installed=installed and spec.here, template=templates) for name, spec in models.items()
    }
    asked = {name: question for name, question in questions.items() if question is not None}
    answers = dict(zip(asked, ask_now([*asked.values()]), strict=True)) if asked else {}
    return {name: answer_with(spec, answers.get(name)) for name, spec in models.items()}


def lacking_gpus(models: Mapping[str, ModelSpec]) -> dict[str, Fault]:
    """Return the models whose GPUs this machine does not have, each with the reason."""
    gpu_requests = {
        name: gpu_request for name, spec in models.items() if (gpu_request := gpu_request_of(spec)) is not None
    }
    if not gpu_requests:
        return {}
    try:
        box: list[Gpu] = read_once()
    except GpusUnknown as e:
        return {
            name: Fault("gpu", f"no GPU of this machine can be seen (NVML: {e})", machine=True) for name in gpu_requests
        }
    outer, all_rooms = os.environ.get("CUDA_VISIBLE_DEVICES"), rooms(box, [])
    verdicts = {name: place(gpu_request, None, all_rooms, outer) for name, gpu_request in gpu_requests.items()}
    return {
        name: Fault("gpu", verdict.message, machine=True)
        for name, verdict in verdicts.items()
        if isinstance(verdict, PlacementRefused)
    }


def problems_of(examined: Examined, faults: Iterable[tuple[str, Fault]]) -> list[Problem]:
    """Return the faults of models as problems with their lines. Leave out keys that already have a problem in the file:
    a fault that follows from that problem would only confuse."""
    known_paths = {problem.path for problem in examined.problems}
    found = [examined.problem(name, fault.key, fault.message) for name, fault in faults]
    return [problem for problem in found if problem.path not in known_paths]


def unused_gpus() -> list[Gpu]:
    """Return the GPUs of this machine as they are without any process; none if they cannot be read."""
    try:
        box = read_once()
    except GpusUnknown:
        return []
    held = [sum(size or 0 for size in gpu.processes.values()) for gpu in box]
    return [replace(gpu, used=gpu.used - size, free=gpu.free + size) for gpu, size in zip(box, held, strict=True)]


def fewest_gpus(estimated: Estimated, gpus: Sequence[Gpu]) -> int:
    """Return the smallest number of GPUs on which a model fits. 1 for a model that fits on no number of them: `plan`
    says what is missing."""
    for count in range(1, len(gpus) + 1):
        wanted = GpuRequest(None, Split(engine_chooses=count > 1), count)
        if estimated.needs is None or isinstance(place(wanted, estimated.needs, rooms(gpus, [])), Placed):
            return count
    return 1
