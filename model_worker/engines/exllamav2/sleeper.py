"""Put a loaded model to sleep, and wake it."""

from collections.abc import Callable
from typing import Any

import torch

from model_worker.engines.exllamav2.kept_pages import KeptPages
from model_worker.engines.exllamav2.load import Loaded
from protocol.process.worker_spec import EngineSpec


class Sleeper:
    """The sleep of one model. All but ``prepare`` and ``absent`` need ``loaded.memory``."""

    def __init__(self, generator: Any, loaded: Loaded, spec: EngineSpec) -> None:
        self._generator, self._loaded, self._prepares = generator, loaded, spec.prepare_sleep
        self._kept = KeptPages(loaded.caches, spec.options.get("sleep_cache", 0)) if loaded.memory is not None else None

    @property
    def absent(self) -> int:
        """Bytes that PyTorch counts as allocated, but that are not on the GPU now."""
        return 0 if self._loaded.memory is None else self._loaded.memory.absent

    @property
    def host_bytes(self) -> int | None:
        """The most host memory that the model takes while it sleeps. None if it cannot sleep."""
        if self._loaded.memory is None or self._kept is None:
            return None
        return self._loaded.memory.host_bytes + self._kept.most_bytes

    def prepare(self) -> bool:
        """See SleepingEngine.prepare_sleep."""
        memory = self._loaded.memory
        return self._prepares and memory is not None and memory.prepare()

    def sleep(self, progress: Callable[[], None]) -> None:
        """Give the GPU memory back. There is no job."""
        assert self._loaded.memory is not None
        assert self._kept is not None
        self._kept.save(self._generator.all_pages)
        torch.cuda.empty_cache()
        self._loaded.memory.sleep(progress)

    def wake(self, progress: Callable[[], None]) -> None:
        """Take the GPU memory again."""
        assert self._loaded.memory is not None
        assert self._kept is not None
        self._loaded.memory.wake(progress)
        self._kept.restore()
        with torch.inference_mode():
            for cache in self._loaded.caches:
                for pair in getattr(cache, "temp_tensors", {}).values():  # quantized caches compute with these
                    for tensor in pair:
                        tensor.zero_()
        torch.cuda.synchronize()
