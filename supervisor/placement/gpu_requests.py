"""Translate the configuration of a model to the GPUs, the question and the needs for its placement. Pure."""

from dataclasses import replace

from supervisor.config import ModelSpec
from supervisor.placement.estimates import Estimated, Question
from supervisor.placement.gpu_shares import Needs, split_of
from supervisor.placement.gpus import EVERY
from supervisor.placement.policy import GpuRequest

VETTED = frozenset({"exllamav2", "transformers"})
"""Engines whose models the estimating process can check."""


def gpu_request_of(spec: ModelSpec) -> GpuRequest | None:
    """Return the GPUs of this machine that a model asks for; None for a model that asks for none here."""
    config = spec.config
    if not spec.visible_devices or not spec.here:
        return None
    pins = None if config.gpu == "auto" else tuple(spec.visible_devices.split(","))
    split = split_of(config.engine, spec.engine_spec.options, config.gpu_count)
    return GpuRequest(pins, split, config.gpu_count)


def question_of(spec: ModelSpec, *, installed: bool = False, template: bool = False) -> Question | None:
    """Return the question for the process that reads the model's directory; None if only the engine can check the
    model.

    installed  whether it is a fault that the engine's packages are not installed here
    template   whether the chat template is to be tried
    """
    if spec.config.engine not in VETTED:
        return None
    gpu_request = gpu_request_of(spec)
    counts = gpu_request.counts if gpu_request is not None else (1,)
    return Question(spec.engine_spec, spec.config.sampling or {}, spec.config.forced or {}, counts, installed, template)


def answer_with(spec: ModelSpec, estimated: Estimated | None) -> Estimated:
    """Return the known needs of a model: its faults first, then the memory that models.yaml declares, then the
    estimate.

    estimated  the answer of the process that reads the model's directory; None if it was not asked
    """
    if estimated is None:
        estimated = Estimated(unknown=f"there is no estimate for engine {spec.config.engine}")
    if estimated.faults:
        return estimated
    gpu_request = gpu_request_of(spec)
    if gpu_request is None:
        return replace(estimated, needs=None, unknown=None)  # it needs no GPU
    if (needs := declared(spec, gpu_request)) is not None:
        return replace(estimated, needs=needs, unknown=None)
    return estimated


def declared(spec: ModelSpec, gpu_request: GpuRequest) -> dict[int, Needs] | None:
    """Return the needs that ``vram`` of models.yaml declares, by number of GPUs. None if it declares none."""
    if spec.config.vram is None:
        return None
    return {count: Needs(declared=spec.config.vram) for count in gpu_request.counts}


def watched_pins(spec: ModelSpec) -> tuple[str, ...]:
    """Return the GPUs on which this model waits for dead workers' memory; every GPU for ``auto``."""
    gpu_request = gpu_request_of(spec)
    if gpu_request is None:
        return ()
    return gpu_request.pins if gpu_request.pins is not None else (EVERY,)
