"""A model's or an adapter's directory as what it may be: foreign, and hostile. Looked at before any engine reads it.

What is there may only be regular files inside the directory, each of a size that such a file can have: a pipe would
hang whoever opens it, a link would have a secret read as a model, and a sparse file of a terabyte would be taken into
memory. JSON is read here, within bounds. Nothing in a directory is ever run: pickled weights are not opened, files of
Python and ``auto_map`` are not followed, tokenizers and templates are data. No torch.

Every complaint is a LoadError of one line with the remedy.
"""

import contextlib
import json
import os
import stat
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from model_worker.engine import LoadError

T = TypeVar("T")
MIB = 1 << 20
TOKENIZER_BYTES = 128 * MIB
"""Of tokenizer.json; those of 260,000 tokens have some 35."""
INDEX_BYTES = 32 * MIB
"""Of model.safetensors.index.json; those of the largest models have some 10."""
JSON_BYTES = 8 * MIB
"""Of any other JSON file."""
TEMPLATE_BYTES = MIB
"""Of a chat template in a file of its own."""
MOST_ENTRIES = 10_000
"""Files in a directory; the largest models come in some hundred."""
LONGEST_NUMBER = 24
"""Characters of a number in JSON: what 64 bits hold, and more than a float says."""
_LIMITS = {"tokenizer.json": TOKENIZER_BYTES, "model.safetensors.index.json": INDEX_BYTES}
_PARTS = ("", "additional_chat_templates")
"""The directory itself, and those in it that are read."""


def vet(directory: Path) -> None:
    """Raise LoadError, naming the entry, for what no model or adapter needs, and its readers would fall for."""
    root = directory.resolve()
    for part in _PARTS:
        place = directory / part
        if part and not os.path.lexists(place):
            continue
        _check_place(place, root)
        try:
            with os.scandir(place) as entries:
                for number, entry in enumerate(entries):
                    if number >= MOST_ENTRIES:
                        raise LoadError(f"{place} has more than {MOST_ENTRIES} entries: give the model's own directory")
                    _check_entry(Path(entry.path), root)
        except OSError as e:
            raise LoadError(f"{place} cannot be read: {e.strerror}") from None


def _check_place(place: Path, root: Path) -> None:
    if place.is_symlink() and not place.resolve().is_relative_to(root) and place.resolve() != root:
        raise LoadError(f"{place} is a link that leads out of the model's directory: put the files there")


def _check_entry(path: Path, root: Path) -> None:
    shown = repr(str(path))[1:-1]
    try:
        if path.is_symlink():
            target = Path(os.path.realpath(path))
            if not (target.is_relative_to(root) or _is_blob_of(target, root)):
                raise LoadError(
                    f"{shown} is a link to {repr(str(target))[1:-1]}, out of the model's directory: put the file "
                    "itself there, or a hard link to it"
                )
        status = path.stat()
    except (OSError, RuntimeError) as e:
        raise LoadError(f"{shown} cannot be read ({getattr(e, 'strerror', None) or e}): remove or mend it") from None
    if stat.S_ISDIR(status.st_mode):
        return
    if not stat.S_ISREG(status.st_mode):
        raise LoadError(f"{shown} is {_kind(status.st_mode)}, where a model has files only: remove it")
    limit = TEMPLATE_BYTES if path.suffix == ".jinja" else _LIMITS.get(path.name, JSON_BYTES)
    if path.suffix in (".json", ".jinja") and status.st_size > limit:
        raise LoadError(f"{shown} has {status.st_size} bytes, such a file has at most {limit}: it is not of a model")


def _is_blob_of(target: Path, root: Path) -> bool:
    """Hugging Face's own cache: models--NAME/snapshots/REVISION holds links to files in models--NAME/blobs."""
    return root.parent.name == "snapshots" and target.parent == root.parent.parent / "blobs"


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}
    return kinds.get(stat.S_IFMT(mode), "no regular file")


def read_json(file: Path, limit: int | None = None) -> dict[str, Any]:
    """The object in a JSON file. Raises LoadError, naming it, for anything else, or more than its name allows.

    limit  bytes, where it is not the file's own limit
    """
    try:
        return parse_json(read_bytes(file, limit or _LIMITS.get(file.name, JSON_BYTES)))
    except ValueError as e:
        raise LoadError(f"{file} cannot be read: {e}") from None


def parse_json(text: bytes) -> dict[str, Any]:
    """The object in a JSON text. Raises ValueError for anything else, also for what is nested without end."""
    try:
        value = json.loads(text.decode(), parse_int=_integer, parse_constant=_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("it must hold a JSON object")
    return value


def _constant(name: str) -> float:
    """Infinity is what some models' configurations hold; NaN would get into everything that is computed."""
    if name == "NaN":
        raise ValueError("NaN, which is no number")
    return float(name)


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_NUMBER:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def read_bytes(file: Path, limit: int) -> bytes:
    """A whole regular file. Raises ValueError if there is none, or it is larger than ``limit``; never waits for one."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        raise ValueError(e.strerror) from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no regular file")
    with open(descriptor, "rb") as f:
        content = f.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return content


def check_shard_names(file: Path, names: Any) -> set[str]:
    """The files that an index names. Raises LoadError for what is not the plain name of a safetensors file."""
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
    """Whether a library in Rust gave up. Its exception is no ``Exception``, and cannot be imported."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def understood(directory: object) -> Iterator[None]:
    """What is raised over contents that nobody has thought of, as a LoadError: the model fails, once, and says so.
    A traceback goes to the log."""
    try:
        yield
    except BaseException as e:
        if not isinstance(e, _OVER_CONTENTS) and not is_panic(e):
            raise
        traceback.print_exc()
        message = " ".join(str(e).split())[:300] or "no more is known"
        raise LoadError(f"{directory} holds what cannot be understood ({type(e).__name__}: {message})") from e


class Faults:
    """Runs several checks of one model and keeps what each of them finds, so that a person learns all faults at once.

    directory  the model's directory, for the message of a fault that no check has a message for
    """

    def __init__(self, directory: object) -> None:
        self._directory = directory
        self._found: list[LoadError] = []

    def of(self, check: Callable[[], T]) -> T | None:
        """Run a check. Returns its result, None if it raised LoadError."""
        try:
            with understood(self._directory):
                return check()
        except LoadError as e:
            self._found += [e, *e.also]
            return None

    def passes(self, check: Callable[[], object]) -> bool:
        """Run a check. Returns whether it raised no LoadError."""
        before = len(self._found)
        self.of(check)
        return len(self._found) == before

    def raise_found(self) -> None:
        """Raise the first fault, which holds the others in ``also``; return if no check has found one."""
        if self._found:
            first, *others = self._found
            first.also = tuple(others)
            raise first
