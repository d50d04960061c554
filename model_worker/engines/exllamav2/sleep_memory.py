"""GPU memory that a model gives back while it sleeps, and takes again at the same addresses.

The package keeps raw pointers to its weights, and captured steps hold the addresses of everything that they use. So the
memory is given back without its addresses: torch_memory_saver maps physical memory to reserved addresses, takes it away
(behind a copy to pinned host memory, if there is to be one), and maps other memory there later. It does this for memory
that comes from its allocator. Here two pools of PyTorch get their memory from it: one for the weights, with a copy in
host memory, and one for the cache, without.

The package's usual way is a library in LD_PRELOAD that catches all calls of cudaMalloc. Its other library is for pools
of PyTorch. It needs nothing at the start of the process, and leaves the rest of the memory to PyTorch's expandable
segments. Scratch memory, captured steps and CUDA's context stay on the GPU: about 1 GiB.

The host memory is pinned, which takes half a second per GiB. So the weights are divided into pieces, and the worker
prepares them one by one while it has nothing to do (``prepare``). The copies stay pinned while the model is awake.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from model_worker.engines import one_line

PIECE = 128 << 20
"""Bytes of weights that are copied at a time. One tensor is never divided, so some pieces are larger."""
_CACHE = b"cache"


class NoSleepError(Exception):
    """The model cannot sleep. The message is one line with the reason."""


class SleepMemory:
    """The pools of one model on the current GPU. Raises NoSleepError if the package cannot be used here."""

    def __init__(self) -> None:
        self._wrapper, allocator = _library()
        self._library: Any = self._wrapper.cdll
        self._weights, self._cache = _pools(allocator)
        self._pieces: list[bytes] = []
        self._begun = 0
        self._prepared = 0
        self._asleep = False

    # --- allocating -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """Take all GPU memory that PyTorch allocates within this context from the pool with a copy."""
        with self._region(self._weights, self._next_piece(), copied=True):
            yield

    @contextlib.contextmanager
    def cache(self) -> Iterator[None]:
        """Take all GPU memory that PyTorch allocates within this context from the pool whose contents are lost."""
        with self._region(self._cache, _CACHE, copied=False):
            yield

    def divide(self) -> None:
        """Begin another piece if the present one is large enough. Called within ``weights``."""
        if torch.cuda.memory_reserved() - self._begun >= PIECE:
            self._library.tms_set_current_tag(self._next_piece())

    def _next_piece(self) -> bytes:
        self._begun = torch.cuda.memory_reserved()
        self._pieces.append(f"weights {len(self._pieces)}".encode())
        return self._pieces[-1]

    @contextlib.contextmanager
    def _region(self, pool: Any, tag: bytes, *, copied: bool) -> Iterator[None]:
        self._wrapper.set_config(
            tag=tag.decode(), interesting_region=True, enable_cpu_backup=copied, cpu_backup_backend="pinned"
        )
        try:
            with torch.cuda.use_mem_pool(pool):
                yield
        finally:
            # It stays "interesting": the library ends the process if a pool frees memory outside of such a region.
            self._wrapper.set_config(tag="default", interesting_region=True, enable_cpu_backup=False)

    # --- moving ---------------------------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> int:
        """The host memory that the copies take."""
        return _size(self._weights)

    @property
    def absent(self) -> int:
        """Bytes that PyTorch counts as allocated, but that are not on the GPU now."""
        return _size(self._weights) + _size(self._cache) if self._asleep else 0

    def prepare(self) -> bool:
        """Pin the host memory of the next piece. Nothing may use the GPU meanwhile. Return whether there are more."""
        if self._prepared < len(self._pieces):
            piece = self._pieces[self._prepared]
            self._move(self._library.tms_pause, piece)
            self._move(self._library.tms_resume, piece)
            self._prepared += 1
        return self._prepared < len(self._pieces)

    def sleep(self, progress: Callable[[], None]) -> None:
        """Copy the weights, and give the GPU memory back. ``progress`` is called before each piece."""
        torch.cuda.synchronize()
        self._move(self._library.tms_pause, _CACHE)
        for piece in self._pieces:
            progress()
            self._move(self._library.tms_pause, piece)
        self._prepared = len(self._pieces)
        self._asleep = True

    def wake(self, progress: Callable[[], None]) -> None:
        """Take the GPU memory again. The weights are what they were, the contents of the cache are anything."""
        for piece in self._pieces:
            progress()
            self._move(self._library.tms_resume, piece)
        self._move(self._library.tms_resume, _CACHE)
        torch.cuda.synchronize()
        self._asleep = False

    @staticmethod
    def _move(function: Callable[[bytes], int], piece: bytes) -> None:
        if code := function(piece):
            raise RuntimeError(f"torch_memory_saver could not move {piece.decode()}: code {code}")


def obstacle(gpus: int, *, allowed: bool) -> str | None:
    """Return why a model cannot sleep, for people. None if it can, as far as this can be known before it is loaded."""
    if not allowed:
        return "models.yaml does not let it sleep"
    if gpus > 1:
        return "its layers are on several GPUs, and the memory of one GPU only can be given back"
    return None


@functools.cache
def _library() -> tuple[Any, Any]:
    """Return torch_memory_saver's library, and PyTorch's name for its allocator. Raises NoSleepError.

    Both live as long as the process: PyTorch calls the allocator for memory that outlives the model.
    """
    try:
        package = importlib.import_module("torch_memory_saver.binary_wrapper")
        utils = importlib.import_module("torch_memory_saver.utils")
    except ImportError as e:
        raise NoSleepError(f"torch_memory_saver cannot be imported: {e}: install modelctl[exllamav2]") from e
    try:
        path = str(utils.get_binary_path_from_package("torch_memory_saver_hook_mode_torch"))
        wrapper: Any = package.BinaryWrapper(path_binary=path)
        kind: Any = torch.cuda.memory.CUDAPluggableAllocator
        allocator = kind(path, "tms_torch_malloc", "tms_torch_free")
    except (OSError, RuntimeError, AttributeError) as e:
        raise NoSleepError(f"torch_memory_saver does not work with this PyTorch and CUDA: {one_line(e)}") from e
    wrapper.cdll.tms_set_retain_cpu_backup(True)
    return wrapper, allocator


_alive: list[Any] = []


def _pools(allocator: Any) -> tuple[Any, Any]:
    """Return pools for weights and cache. They are never destroyed: a worker has one model, and tensors outlive it."""
    pools: Any = torch.cuda.MemPool(allocator.allocator()), torch.cuda.MemPool(allocator.allocator())
    _alive.append(pools)
    return pools  # type: ignore[no-any-return]


def _size(pool: Any) -> int:
    return sum(segment["total_size"] for segment in pool.snapshot())
