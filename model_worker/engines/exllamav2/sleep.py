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
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from model_worker.engines import one_line
from protocol.process.worker_spec import PAGE_TOKENS

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


# The pages of the cache that go to host memory with a model that sleeps, so that no prompt in them is computed again.
#
# A page stays in the generator's page table while the model sleeps. Its keys and values are copied to host memory, and
# back to the same page. The pages that find no room there are forgotten.


class KeptPages:
    """Copies of pages of some caches, which have the same page table. ``most`` is a number of bytes."""

    def __init__(self, caches: Sequence[Any], most: int) -> None:
        self._tensors = [_paged(tensor) for cache in caches for tensor in cache.all_tensors()]
        self._pages = min(most // sum(tensor.shape[1] for tensor in self._tensors), self._tensors[0].shape[0])
        self._kept: list[int] = []
        self._copies: list[torch.Tensor] = []

    @property
    def most_bytes(self) -> int:
        """The most host memory of the copies."""
        return self._pages * sum(tensor.shape[1] for tensor in self._tensors)

    @torch.inference_mode()
    def save(self, pages: Sequence[Any]) -> None:
        """Copy the latest pages that hold keys and values, as many as there is room for, and clear the others. No page
        is in use."""
        latest = _latest_first(pages)
        kept = latest[: self._pages]
        for page in latest[self._pages :]:
            page.clear()
        count = len(kept)
        self._kept = sorted(page.page_index for page in kept)
        self._copies = []
        for tensor in self._tensors if count else ():
            index = torch.tensor(self._kept, device=tensor.device)
            copy = torch.empty((count, tensor.shape[1]), dtype=torch.uint8, pin_memory=tensor.is_cuda)
            copy.copy_(tensor.index_select(0, index))
            self._copies.append(copy)

    @torch.inference_mode()
    def restore(self) -> None:
        """Fill the caches with zeros, and copy the pages back."""
        for tensor in self._tensors:
            tensor.zero_()  # what was never written may be no number, which attention's mask would not hide
        for tensor, copy in zip(self._tensors, self._copies, strict=bool(self._copies)):
            tensor.index_copy_(0, torch.tensor(self._kept, device=tensor.device), copy.to(tensor.device))
        self._kept, self._copies = [], []


def _paged(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the cache [1, tokens, ...] as bytes [pages, bytes of a page]."""
    return tensor.view(torch.uint8).view(tensor.shape[1] // PAGE_TOKENS, -1)


def _latest_first(pages: Sequence[Any]) -> list[Any]:
    """Return the pages that hold keys and values: the text that was used last comes first, and of a text its beginning.

    The generator numbers pages in the order of their use (``access_serial``), those of one text one by one.
    """
    written = {page.phash: page for page in pages if page.kv_position > 0}
    ordered: dict[Any, Any] = {}
    for page in sorted(written.values(), key=lambda page: -page.access_serial):
        text: list[Any] = []
        at: Any = page
        while at is not None and at.phash not in ordered:
            text.append(at)
            at = written.get(at.prev_hash)
        ordered |= {part.phash: part for part in reversed(text)}
    return list(ordered.values())
