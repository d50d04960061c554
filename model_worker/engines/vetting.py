"""Check the files of a model's or an adapter's directory before any engine reads them. The directory may be hostile.

A directory may only hold regular files, inside of the directory, of plausible sizes. A pipe would hang its reader, a
link would have a secret read as a model, and a sparse file of a terabyte would be read into memory. This module reads
JSON within limits. Nothing in a directory is ever run: pickled weights are not opened, Python files and ``auto_map``
are not followed, tokenizers and templates are data.

Every fault is a LoadError of one line with the remedy.
"""

import contextlib
import json
import os
import re
import stat
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from model_worker.engine import LoadError
from model_worker.engines import BUILT_IN
from protocol.process.paths import AWAY_ERRORS, is_absent, shown, trusted, weakness
from protocol.process.worker_spec import EngineSpec

# Decide where the files of a model's directory may be, and open them there. The directory may be hostile.
#
# An entry of a directory may be a link out of it:
#
# * Weights (``*.safetensors``) may be anywhere. The target must be a regular file of this user or of root. Nobody else
#   may be able to change the target, a directory above it, or a link on the way.
# * Any other file must be in a directory that ``supervisor.model_roots`` names, or in Hugging Face's cache.
#
# An entry is opened once, without reading it (O_PATH). What is checked is that descriptor, and what is read later is
# the same file, whatever the entry is by then.


_MOST_LINKS = 40
"""The links that Linux follows on the way to one file, at most."""
_BLOB = re.compile(r"/.*/models--[^/]+/blobs/[0-9a-f]{40}(?:[0-9a-f]{24})?")
"""A file in the cache of Hugging Face's hub. Its name is a hash. Older versions of the hub's package made directories
of links to such files anywhere."""


@dataclass(frozen=True)
class Bounds:
    """Where the files of a model's directory may be.

    directory  real path of the directory
    roots      real paths of the directories that ``supervisor.model_roots`` names
    """

    directory: Path
    roots: tuple[Path, ...] = ()

    @classmethod
    def of(cls, directory: Path, roots: Iterable[str] = ()) -> "Bounds":
        return cls(Path(os.path.realpath(directory)), tuple(Path(os.path.realpath(root)) for root in roots))


def open_place(path: Path, bounds: Bounds) -> int:
    """Open a file or directory without reading it (O_PATH). Return the descriptor.

    Raises LoadError if it is where it may not be, OSError if it cannot be opened.
    """
    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if not any(target.is_relative_to(root) for root in (bounds.directory, *bounds.roots)):
            _check_outside(path, target, os.fstat(descriptor), bounds)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def open_file(path: Path, bounds: Bounds) -> int:
    """Open a regular file for reading. A pipe or a device is never opened. Return the descriptor.

    Raises LoadError if it is where it may not be, OSError if it cannot be opened, ValueError if it is no regular file.
    """
    place = open_place(path, bounds)
    try:
        if not stat.S_ISREG(os.fstat(place).st_mode):
            raise ValueError("it is no regular file")
        # Not O_NONBLOCK: where another process has a lease on the file, that would fail instead of waiting.
        return os.open(f"/proc/self/fd/{place}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(place)


def _check_outside(path: Path, target: Path, status: os.stat_result, bounds: Bounds) -> None:
    snapshots = bounds.directory.parent
    if snapshots.name == "snapshots" and target.parent == snapshots.parent / "blobs":
        return
    if _BLOB.fullmatch(str(target)) and status.st_uid in trusted():
        return
    what = f"{shown(path)} is a link to {shown(target)}, out of the model's directory"
    if path.suffix != ".safetensors":
        raise LoadError(
            f"{what}: put the file itself there, or a hard link to it, or name the directory of the target in "
            "supervisor.model_roots"
        )
    if why := _changeable(path, status):
        raise LoadError(
            f"{what}, and {why}: change that, put the file itself there, or name the directory of the target in "
            "supervisor.model_roots"
        )


def _changeable(path: Path, status: os.stat_result) -> str | None:
    """Return how another user could change the file to which a link leads; None if nobody else can.

    status  of the file that was opened
    """
    checked: set[str] = set()
    last = None
    for last in _way(path):
        for place in (last, *map(str, Path(last).parents)):
            if place not in checked and (why := weakness(place)):
                return why
            checked.add(place)
    found = os.stat(last) if last is not None else None
    if found is None or (found.st_dev, found.st_ino) != (status.st_dev, status.st_ino):
        return "the link was exchanged while it was checked"
    return None


def _way(path: Path) -> Iterator[str]:
    """Yield every place on the way of a link: each directory, each further link, and at last the target."""
    at = os.path.realpath(path.parent)
    parts = deque([path.name])
    links = 0
    while parts:
        part = parts.popleft()
        if part in ("", "."):
            continue
        if part == "..":
            at = os.path.dirname(at)
            continue
        here = os.path.join(at, part)
        if links:  # the entry itself is in the model's directory, which may be anyone's
            yield here
        if not os.path.islink(here):
            at = here
            continue
        links += 1
        if links > _MOST_LINKS:
            raise LoadError(f"{shown(path)} is a link with more than {_MOST_LINKS} links on its way: remove it")
        text = os.readlink(here)
        if text.startswith("/"):
            at = "/"
        parts.extendleft(reversed(text.split("/")))


T = TypeVar("T")
MIB = 1 << 20
JSON_BYTES = 8 * MIB
"""The largest size of a JSON file in bytes, unless ``READ`` has another. The largest known one is Gemma 3's
tokenizer_config.json, with 1.2 MB for 6,242 added tokens. Python takes some ten times the bytes."""
TEMPLATE_BYTES = MIB
"""The largest size of a chat template in bytes. The largest of llama.cpp's collection of 69 has 17 kB (gpt-oss)."""
READ = {
    "tokenizer.json": 128 * MIB,  # the largest has 33 MB, for 262,144 tokens (Gemma 3)
    "model.safetensors.index.json": 32 * MIB,  # MOST_TENSORS of ``model_dir``, with 120 bytes each
    "chat_template.jinja": TEMPLATE_BYTES,
    "additional_chat_templates/tool_use.jinja": TEMPLATE_BYTES,
    "chat_template.json": 2 * TEMPLATE_BYTES,  # a template, and a backslash before each quotation mark and line break
} | dict.fromkeys(
    (
        "config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
        "added_tokens.json", "quantize_config.json", "preprocessor_config.json", "adapter_config.json",
    ),
    JSON_BYTES,
)  # fmt: skip
"""The largest size in bytes of each file that modelctl or a package reads, by its name in the directory.

The size of any other file does not matter: tekken.json has 19 MB, trainer_state.json grows with the training. The
weights are not in this table: only their headers are read as a whole (``model_dir``).
"""
MOST_ENTRIES = 10_000
"""The most entries in a directory. The largest models come in some hundred files. Each entry is looked at, and on a
file system of the network that takes a millisecond: 10,000 take half of the time that a check may take."""
LONGEST_NUMBER = sys.int_info.default_max_str_digits
"""The most characters of an integer in JSON: 4300. Python reads no longer ones, because that takes quadratic time. So
the packages would refuse the file."""
_WIDEST = 1 << 64
"""Integers at or above this number are no count of anything, and become floats."""
_LFS = b"version https://git-lfs"
_PARTS = ("", "additional_chat_templates")
"""The directory itself, and the subdirectories that are read."""


def is_away(error: BaseException, spec: EngineSpec) -> bool:
    """Return whether a model could not be read because its files are away, so that another try may help.

    A file system that is away answers with certain errors. If it is not mounted, its directory is missing or empty.
    What is there and wrong is not away.
    """
    key = error.key if isinstance(error, LoadError) else None
    if key is not None and key.partition(".")[0] not in ("model_dir", "draft_model", "lora"):
        return False  # an option is wrong
    directories = [spec.model_dir]
    if spec.engine in BUILT_IN:  # the options of another engine may mean anything
        directories += filter(None, [spec.options.get("draft_model")])
        directories += [entry["dir"] for entry in spec.options.get("lora") or ()]
    return any(map(is_absent, directories)) or any(
        isinstance(cause, OSError) and cause.errno in AWAY_ERRORS for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, and the errors that led to it."""
    rest, seen = [error], set()
    while rest:
        one = rest.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            also = one.also if isinstance(one, LoadError) else ()
            rest += [e for e in (one.__cause__, one.__context__, *also) if e is not None]


def vet(directory: Path, bounds: Bounds | None = None) -> None:
    """Raise LoadError, naming the entry, for an entry that no model or adapter needs and that would harm its
    readers.

    bounds  where its files may be; None: in the directory itself, see ``Bounds``
    """
    bounds = bounds or Bounds.of(directory)
    for part in _PARTS:
        place = directory / part
        if part and not os.path.lexists(place):
            continue
        try:
            os.close(open_place(place, bounds))
            with os.scandir(place) as entries:
                for number, entry in enumerate(entries):
                    if number >= MOST_ENTRIES:
                        raise LoadError(f"{place} has more than {MOST_ENTRIES} entries: give the model's own directory")
                    _check_entry(Path(entry.path), directory, bounds)
        except OSError as e:
            raise LoadError(f"{place} cannot be read: {e.strerror}") from None


def _check_entry(path: Path, directory: Path, bounds: Bounds) -> None:
    shown = repr(str(path))[1:-1]
    try:
        descriptor = open_place(path, bounds)
        status = os.fstat(descriptor)
        os.close(descriptor)
    except (OSError, RuntimeError) as e:
        raise LoadError(f"{shown} cannot be read ({getattr(e, 'strerror', None) or e}): remove or mend it") from None
    if stat.S_ISDIR(status.st_mode):
        return
    if not stat.S_ISREG(status.st_mode):
        raise LoadError(f"{shown} is {_kind(status.st_mode)}, where a model has files only: remove it")
    limit = READ.get(str(path.relative_to(directory)))
    if limit is not None and status.st_size > limit:
        raise LoadError(f"{shown} has {status.st_size} bytes, such a file has at most {limit}: it is not of a model")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return kinds.get(stat.S_IFMT(mode), "no regular file")


def read_json(file: Path, bounds: Bounds | None = None) -> dict[str, Any]:
    """Return the object in a JSON file. Raises LoadError, naming the file, for anything else, or for too large a file.

    bounds  where the file may be; None: in its directory
    """
    try:
        content = read_bytes(file, READ.get(file.name, JSON_BYTES), bounds)
        if not content.strip():
            raise LoadError(f"{file} is empty: download it again")
        return parse_json(content)
    except ValueError as e:
        raise LoadError(f"{file} cannot be read: {_without_content(e)}") from None


def _without_content(error: ValueError) -> str:
    """Return an error's text. Python's error about a byte that is no text would show that byte."""
    return "it is no UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)


def parse_json(text: bytes, pairs: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return the object in a JSON text. Raises ValueError for anything else, and for endless nesting.

    pairs  makes each object from its names and values; None: of a name that stands twice, the second value counts
    """
    try:
        value = json.loads(text.decode(), parse_int=_integer, parse_constant=_constant, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it must hold a JSON object")
    return value


def _constant(name: str) -> float:
    """Return infinity, which some models' configurations hold. Raise ValueError for NaN, which would spread through
    results."""
    if name == "NaN":
        raise ValueError("NaN, which is no number")
    return float(name)


def _integer(digits: str) -> int | float:
    """Return a number. transformers writes 1000000000000000019884624838656 for a length without a limit."""
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(digits)} digits, Python reads at most {LONGEST_NUMBER}")
    number = int(digits)
    if -_WIDEST < number < _WIDEST:
        return number
    return float(digits)  # infinite from 309 digits on


def read_bytes(file: Path, limit: int, bounds: Bounds | None = None) -> bytes:
    """Return the content of a regular file. A pipe or a device is never opened.

    bounds  where the file may be; None: in its directory

    Raises ValueError if there is no such file, or if it is larger than ``limit`` bytes. Raises LoadError for a file
    that is where it may not be, and for the pointer that Git LFS leaves in place of a file.
    """
    try:
        descriptor = open_file(file, bounds or Bounds.of(file.parent))
    except OSError as e:
        raise ValueError(e.strerror) from None
    with open(descriptor, "rb") as f:
        content = f.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    check_no_pointer(file, content)
    return content


def check_no_pointer(file: Path, beginning: bytes) -> None:
    """Raise LoadError if a file is only the pointer that Git LFS leaves in place of the file itself."""
    if beginning.startswith(_LFS):
        raise LoadError(f"{file} is a pointer of Git LFS, not the file itself: run `git lfs pull` in that directory")


def check_shard_names(file: Path, names: Any) -> set[str]:
    """Return the files that an index names. Raises LoadError for a name that is not that of a safetensors file."""
    if not isinstance(names, dict):
        raise LoadError(f"{file}: weight_map must be an object of names of tensors and files")
    for name in set(map(str, names.values())):
        if name != os.path.basename(name) or not name.endswith(".safetensors") or "\0" in name:
            raise LoadError(
                f"{file}: weight_map names {name[:200]!r}, which is no safetensors file of this directory: remove the "
                "index, or write the file's own name"
            )
    return set(map(str, names.values()))


_OVER_CONTENTS = (
    TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, AssertionError
)  # fmt: skip


def is_panic(error: BaseException) -> bool:
    """Return whether a library in Rust panicked. Its exception is no ``Exception``, and cannot be imported."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def understood(directory: object) -> Iterator[None]:
    """Turn unforeseen exceptions about the contents of a directory into a LoadError, so that the model fails once, with
    a reason.

    The traceback goes to the log.
    """
    try:
        yield
    except BaseException as e:
        if not isinstance(e, _OVER_CONTENTS) and not is_panic(e):
            raise
        traceback.print_exc()
        message = " ".join(str(e).split())[:300] or "no more is known"
        raise LoadError(f"{directory} holds what cannot be understood ({type(e).__name__}: {message})") from e


class Faults:
    """Runs several checks of one model and keeps all faults that they find, so that a person sees them at once.

    directory  the model's directory, for the message of a fault that no check has a message for
    """

    def __init__(self, directory: object) -> None:
        self._directory = directory
        self._found: list[LoadError] = []

    def of(self, check: Callable[[], T]) -> T | None:
        """Run a check. Return its result, or None if it raised LoadError."""
        try:
            with understood(self._directory):
                return check()
        except LoadError as e:
            self._found += [e, *e.also]
            return None

    def passes(self, check: Callable[[], object]) -> bool:
        """Run a check. Return whether it raised no LoadError."""
        before = len(self._found)
        self.of(check)
        return len(self._found) == before

    def raise_found(self) -> None:
        """Raise the first fault, with the others in ``also``. Return if no check has found one."""
        if self._found:
            first, *others = self._found
            first.also = tuple(others)
            raise first


# Name the formats of weights that no engine loads, with what to do instead.


REMEDY = (
    "use the model's EXL2 weights, GPTQ with 4 bits, or its 16-bit weights (`modelctl quantize` makes EXL2 of them)"
)
_NAMES = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "exl3": "EXL3, the format of ExLlamaV3",
    "fbgemm_fp8": "FP8",
    "fp8": "FP8",
    "mlx": "MLX, which runs on Apple's machines only",
    "modelopt": "ModelOpt (NVFP4 or FP8)",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
}


def declared_method(config: Mapping[str, Any]) -> Any:
    """Return how config.json says that the weights are quantized, None if it does not. The value may be of any type."""
    declared = config.get("quantization_config")
    if isinstance(declared, dict) and (method := declared.get("quant_method")):
        if method in ("compressed-tensors", "modelopt") and "nvfp4" in f"{declared.get('format')}".lower():
            return "NVFP4"
        return method
    if config.get("compression_config"):  # the key of older versions of compressed-tensors
        return "compressed-tensors"
    mlx = config.get("quantization")
    return "mlx" if isinstance(mlx, dict) and {"bits", "group_size"} <= set(mlx) else None


def refusal(path: object, method: str) -> str:
    """Return the words about weights in a format that no engine loads."""
    return f"{path} is quantized by {_NAMES.get(method, method)}, which no engine here loads: {REMEDY}"
