"""What a configured model asks of placement. Pure."""

from supervisor.config import ModelSpec
from supervisor.placement.gpu_shares import Needs, Split
from supervisor.placement.gpus import EVERY
from supervisor.placement.policy import Wish

ESTIMATED = frozenset({"exllamav2"})
"""Engines whose needs ``model_worker.estimating`` knows."""


def wish_of(spec: ModelSpec) -> Wish | None:
    """None for a model on the CPU, which takes nothing of a GPU."""
    config = spec.config
    if not spec.visible_devices:
        return None
    if config.gpu == "auto":
        return Wish(None)
    by_hand = tuple(int(gb * 2**30) for gb in config.gpu_split) if config.gpu_split else None
    chooses = config.engine == "exllamav2" and isinstance(config.gpu, tuple) and len(config.gpu) > 1 and not by_hand
    reserve = tuple(mb << 20 for mb in config.autosplit_reserve) if config.autosplit_reserve else None
    return Wish(tuple(spec.visible_devices.split(",")), Split(by_hand, reserve, bool(config.tensor_parallel), chooses))


def declared(spec: ModelSpec, wish: Wish) -> dict[int, Needs] | None:
    """What models.yaml itself says of the needs, by number of GPUs; None if it does not."""
    if spec.config.vram is None:
        return None
    return {count: Needs(declared=spec.config.vram) for count in wish.counts}


def watched_pins(spec: ModelSpec) -> tuple[str, ...]:
    """The GPUs on which dead workers' memory matters to this model; for ``auto`` every one."""
    wish = wish_of(spec)
    if wish is None:
        return ()
    return wish.pins if wish.pins is not None else (EVERY,)
