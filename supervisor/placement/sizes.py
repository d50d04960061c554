"""Sizes of memory as people write them: ``20GiB``, ``20GB``, ``24G``, ``90%``. Pure."""

import re
from dataclasses import dataclass

_SIZE = re.compile(r"^(\d+(?:\.\d+)?) ?(B|[KMGT]|[KMGT]iB|[kKMGT]B)$")
_SHARE = re.compile(r"^(\d+(?:\.\d+)?) ?%$")
MAX_BYTES = 1 << 50


def parse_size(value: object) -> int:
    """Return a size in bytes. ``GiB`` and ``G`` are 2**30, ``GB`` is 10**9, a number is bytes. Raises ValueError."""
    size = 0
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str) and (match := _SIZE.match(value)):
        unit = match[2]
        base = 1000 if len(unit) == 2 else 1024
        power = 0 if unit == "B" else "KMGT".index(unit[0].upper()) + 1
        size = int(float(match[1]) * base**power)
    if not 0 < size <= MAX_BYTES:
        raise ValueError("must be a size such as 20GiB, 512MiB or 20GB")
    return size


@dataclass(frozen=True, slots=True)
class Limit:
    """A part of a GPU's memory: a number of bytes, or a share of all its memory (above 0, at most 1)."""

    bytes: int | None = None
    share: float | None = None

    def of(self, total: int) -> int:
        """Return the limit in bytes on a GPU of ``total`` bytes."""
        if self.bytes is not None:
            return self.bytes
        assert self.share is not None
        return int(total * self.share)


def parse_limit(value: object) -> Limit:
    """Return the limit that a text such as ``20GiB`` or ``90%`` means. Raises ValueError."""
    if isinstance(value, str) and (match := _SHARE.match(value)) and 0 < float(match[1]) <= 100:
        return Limit(share=float(match[1]) / 100)
    try:
        return Limit(bytes=parse_size(value))
    except ValueError:
        raise ValueError("must be a size such as 20GiB or 20GB, or a share of the GPU such as 90%") from None
