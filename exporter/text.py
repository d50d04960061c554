"""Write metrics as text for Prometheus, in pieces, so that a process can do other work between two of them. Pure."""

import zlib
from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
EVERY_S: Final = 1.0
"""Seconds for which a text is given again. The metrics of many models take long to make."""
_LINES: Final = 500
"""Most lines of a piece: 2 to 5 ms of work."""
_LEVEL: Final = 1
"""Level of compression. A higher level takes three times as long for a little less."""
_GZIP: Final = 16 + zlib.MAX_WBITS
_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES: Final = str.maketrans({"\\": r"\\", "\n": r"\n"})


def pieces(found: Iterable[Metric]) -> Iterator[bytes]:
    """Yield the text of metrics, in the format CONTENT_TYPE."""
    for metric in found:
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        help_text = metric.documentation.translate(_HELP_ESCAPES)
        lines = [f"# HELP {name} {help_text}\n# TYPE {name} {metric.type}\n"]
        for sample in metric.samples:
            lines.append(_line(sample))
            if len(lines) >= _LINES:
                yield "".join(lines).encode()
                lines.clear()
        yield "".join(lines).encode()


def _line(sample: Sample) -> str:
    labels = ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in sorted(sample.labels.items()))
    shown = f"{{{labels}}}" if labels else ""
    return f"{sample.name}{shown} {float(sample.value)!r}\n"


def compressed(text: Iterable[bytes]) -> Iterator[bytes]:
    """Yield a text in the format of gzip."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
    for piece in text:
        yield packer.compress(piece)
    yield packer.flush()


def accepts_gzip(header: str) -> bool:
    """Return whether a client takes gzip, by its header Accept-Encoding."""
    for coding in header.lower().replace(" ", "").split(","):
        name, _, weight = coding.partition(";q=")
        if name == "gzip":
            return weight.strip("0.") != "" or not weight
    return False
