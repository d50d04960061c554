"""Read a YAML file as plain data and remember the line of each value, so that an error can name file, line and key
path."""

import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from protocol.process.shown import pattern_of

# Put variables of the environment into the values of a YAML file: ``${NAME}`` and ``${NAME:-default}``. Pure.
#
# A value may be a secret. So whatever shows the value of a key shows it as the file has it (``Filled.written``), and
# messages are masked (``Filled.texts``).


MOST_CHARS: Final = 65_536
"""The longest value with its variables put in."""
_REFERENCE: Final = re.compile(r"\$\$\{|\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}|\$\{")

_QUOTED: Final = "${}"
"""The key that stands for a quoted text in JSON. No file can have it beside a value."""


class UnknownVariable(ValueError):
    """A reference that has no value. The message says why, and what to do."""


@dataclass(frozen=True)
class Filled:
    """A value with variables put in.

    written    as the file has it
    text       with the values of the variables
    variables  the variables that the environment has: name → value
    """

    written: str
    text: str
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def texts(self) -> dict[str, str]:
        """The values of the variables, and their references: value → ``${NAME}``."""
        return {value: f"${{{name}}}" for name, value in self.variables.items()}


class Quoted(str):
    """A text in quotes that has variables. It counts as a number or a switch where a key wants one: in a map on one
    line, ``{cache_size: "${SIZE}"}``, YAML lets nobody write it without quotes."""

    @property
    def unquoted(self) -> Any:
        """The value of the text without quotes."""
        return plain_value(str(self))


def fill(text: str, environment: Mapping[str, str]) -> Filled | None:
    """Return a text with its variables put in; None if it names none. Raises UnknownVariable."""
    if "${" not in text:
        return None
    variables: dict[str, str] = {}

    def value_of(found: "re.Match[str]") -> str:
        name, default = found[1], found[2]
        if found[0] == "$${":
            return "${"
        if name is None:
            raise UnknownVariable(
                "has ${ without the name of a variable and }: write ${NAME}, ${NAME:-default}, or $${ for the text ${"
            )
        value = environment.get(name)
        if default is not None and not value:
            return str(default)
        if value is None:
            remedy = f"set it where modelctl is started, or write ${{{name}:-default}}"
            raise UnknownVariable(f"names the variable {name}, which the environment does not have: {remedy}")
        if "\0" in value or not _is_text(value):
            raise UnknownVariable(f"names the variable {name}, whose value is no text in UTF-8: set another one")
        variables[name] = value
        return value

    filled = _REFERENCE.sub(value_of, text)
    if len(filled) > MOST_CHARS:
        raise UnknownVariable(f"has more than {MOST_CHARS} characters with its variables put in: set shorter ones")
    return Filled(text, filled, variables)


def plain_value(text: str) -> Any:
    """Return the value of a text as YAML reads a word without quotes: a number, true, null or the text itself.

    Lists, maps and comments are not read: a variable cannot bring more than one value.
    """
    resolver = yaml.SafeLoader("")
    try:
        tag = resolver.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        return resolver.construct_object(yaml.ScalarNode(tag, text))
    except (ValueError, OverflowError, yaml.YAMLError):  # 2024-13-99 looks like a date
        return text
    finally:
        resolver.dispose()


def packed(value: Any) -> Any:
    """Return a value of a file, for JSON. JSON would make a plain text of one that is ``Quoted``."""
    if isinstance(value, dict):
        return {key: packed(part) for key, part in value.items()}
    if isinstance(value, list):
        return [packed(part) for part in value]
    return {_QUOTED: str(value)} if isinstance(value, Quoted) else value


def unpacked(value: Any) -> Any:
    """Return the value that ``packed`` has packed."""
    if isinstance(value, dict):
        if value.keys() == {_QUOTED}:
            return Quoted(value[_QUOTED])
        return {key: unpacked(part) for key, part in value.items()}
    return [unpacked(part) for part in value] if isinstance(value, list) else value


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # bytes that are not UTF-8
        return False
    return True


# Decide when a models.yaml that was changed is read again (``serve --watch``). Pure, except ``signature_of``.


LOOK_S = 0.5
"""Seconds between two looks at the file. A look is one system call."""
SETTLE_S = 1.0
"""Seconds without a change after which the file is read. Editors and copies write a file in parts."""

Signature = tuple[int, int, int, int]
"""Time of the last change in nanoseconds, size, inode and device: an editor may put another file in its place."""


def signature_of(file: Path) -> Signature | None:
    """Return what tells the file's present content from another; None if there is no file."""
    try:
        return signature(os.stat(file))
    except OSError:
        return None


def signature(found: os.stat_result) -> Signature:
    """Return the signature of a file by the kernel's answer about it."""
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev


class ConfigWatch:
    """What was seen of a file.

    read  the signature of the content that was read last
    """

    def __init__(self, read: Signature | None) -> None:
        self._read = self._seen = read
        self._since = 0.0

    def due(self, signature: Signature | None, now: float) -> bool:
        """Return whether the file is to be read now. Each change is read once, also if the file has faults.

        A file that is missing is not read: an editor may be about to put the new one in its place.
        """
        if signature != self._seen:
            self._seen, self._since = signature, now
            return False
        if signature is None or signature == self._read or now - self._since < SETTLE_S:
            return False
        self._read = signature
        return True


MAX_FILE_BYTES = 1 << 20
MAX_NODES = 100_000
"""Values in a file, with aliases expanded. This limits what a few nested aliases can multiply into."""
MAX_MERGED = 100
"""The most mappings that one ``<<`` may name."""
MAX_MERGED_KEYS = 1000
"""The most keys that one ``<<`` may add."""
_PLAIN_TAGS: dict[type[yaml.Node], str] = {
    yaml.MappingNode: "tag:yaml.org,2002:map",
    yaml.SequenceNode: "tag:yaml.org,2002:seq",
}

KeyPath = tuple[str | int, ...]
NOTE_PREFIX = "x-"
"""Keys at the top level that begin so mean nothing. They may hold what YAML's anchors name, for several models."""
PATHS: Final = frozenset({
    "model_dir", "draft_model", "dir", "chat_template", "model_roots", "file", "request_log", "keys", "certificate",
    "private_key", "directory", "folders", "path",
})  # fmt: skip
"""Keys whose values are paths."""
OPTIONS: Final = frozenset({"options", "template_kwargs", "sampling", "forced"})
"""Keys whose maps may hold any text."""
LONG: Final = 8
"""Characters of a text among options that no other text holds by chance."""
SHORT: Final = 4
"""Characters of a value that is not looked for in messages about other keys."""


@dataclass(frozen=True)
class Problem:
    """One error in a file, or in an environment variable.

    file  the path of the file, or the name of the variable
    line  counts from 1; 0 for the file itself, and for a variable
    path  the dotted key path
    """

    file: str
    line: int
    path: str
    message: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.path}: {self.message}" if self.path else f"{place}: {self.message}"


def is_path(path: KeyPath) -> bool:
    """Return whether a key's value is a path, or one of a list of paths."""
    return bool(PATHS.intersection(path[-2:] if path and isinstance(path[-1], int) else path[-1:]))


class ConfigError(Exception):
    """A configuration that is not used. ``problems`` holds all errors that were found."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


def read_file(file: Path) -> tuple[bytes, Signature]:
    """Return the content of a file, and its signature from before it was read.

    Raises ConfigError for a file that cannot be read, or that is too large.
    """
    try:
        # O_NONBLOCK: a running supervisor reads the file again, and a pipe in its place would block the supervisor.
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise ConfigError([Problem(str(file), 0, "", "cannot be read: it is no regular file; give one")])
        with open(descriptor, "rb") as f:
            raw = f.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        message = "there is no such file: name a models.yaml, or let `modelctl init` write one"
        raise ConfigError([Problem(str(file), 0, "", message)]) from None
    except OSError as e:
        raise ConfigError([Problem(str(file), 0, "", f"cannot be read: {e.strerror}")]) from None
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError([Problem(str(file), 0, "", f"is larger than {MAX_FILE_BYTES} bytes")])
    return raw, signature(found)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, with merge keys that cannot multiply without end: each level is checked before the next."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge" and len(value.value) > MAX_MERGED:
                raise ValueError(f"more than {MAX_MERGED} mappings in one '<<'")
        before = len(node.value)
        super().flatten_mapping(node)
        if len(node.value) - before > MAX_MERGED_KEYS:
            raise ValueError(f"more than {MAX_MERGED_KEYS} keys from one '<<'")


class YamlSource:
    """Data and lines of one file. Raises ConfigError if the file cannot be read or parsed.

    data      the values of the file; if a key occurs twice, its second value
    problems  the keys that occur twice. A file with any must not be used
    read      the signature of the content

    environment  the variables that values of the file may name; None: ``${`` means nothing
    """

    def __init__(self, file: Path, environment: Mapping[str, str] | None = None, *, raw: bytes | None = None) -> None:
        """Read the file.

        raw  its content, if that is known. Then nothing is read, and the signature is one of no file
        """
        self.file = str(file)
        self._environment = environment
        self.filled: dict[KeyPath, Filled] = {}
        """The values of the file with variables put in, by their paths in the file."""
        self.unfilled: set[KeyPath] = set()
        """Values that name a variable without a value. ``problems`` has them; other problems of theirs mean nothing."""
        self._masks: list[tuple[KeyPath, str, str]] | None = None
        self._lines: dict[KeyPath, int] = {}
        self.variables: dict[KeyPath, str] = {}
        """The values that an environment variable has set, and its name."""
        self.moved: dict[KeyPath, KeyPath] = {}
        """The values that stand elsewhere in this file, and their path there."""
        self.defaults: dict[KeyPath, tuple[str, int]] = {}
        """The values that another file has, because this one leaves them out: the file and the line."""
        self.problems: list[Problem] = []
        self._nodes = 0
        # The signature is older than the content: a change during the reading is seen as one that is to be read, too.
        raw, self.read = read_file(file) if raw is None else (raw, (0, 0, 0, 0))
        self.data = self._parse(raw)

    def problem(self, path: KeyPath, message: str) -> Problem:
        """Return a problem at a key path, with the variable or line of the path or of its nearest existing parent."""
        place, line = self.origin(path) or (self.file, 0)
        return Problem(place, line, ".".join(map(str, path)), self._masked(path, message))

    def written(self, path: KeyPath, value: Any) -> Any:
        """Return a value as the file has it: with the names of variables, and not with their values."""
        if isinstance(value, dict):
            return {key: self.written((*path, key), part) for key, part in value.items()}
        if isinstance(value, list):
            return [self.written((*path, index), part) for index, part in enumerate(value)]
        place = self._place(path)
        filled = None if place is None else self.filled.get(place)
        if place is None or filled is None:
            return value
        if value == filled.text or value == plain_value(filled.text):
            return filled.written
        if not isinstance(value, str):
            return value
        texts = dict(self.masks_of(place))  # the directory of a model below a folder
        return pattern_of(texts).sub(lambda found: texts[found[0]], value)

    def masks_of(self, path: KeyPath) -> list[tuple[str, str]]:
        """Return pairs of (text, what may be shown in its place) for a value of the file that has variables."""
        filled = self.filled[path]
        base = Path(self.file).absolute().parent
        found = {filled.text: filled.written}
        if is_path(path):
            with suppress(ValueError, RuntimeError, OSError):
                whole = base / Path(filled.text).expanduser()
                found |= {str(whole): filled.written, str(whole.resolve()): filled.written}
        found |= filled.texts
        found |= {repr(text)[1:-1]: shown for text, shown in found.items()}
        return [(text, shown) for text, shown in found.items() if text.strip("/")]

    @property
    def used_variables(self) -> dict[str, str]:
        """The variables of the environment that the values of the file name."""
        return {name: value for filled in self.filled.values() for name, value in filled.variables.items()}

    def masks(self) -> dict[str, str]:
        """Return the texts that must not be shown while the file is in use, and what may be shown in their place.

        They are whole paths, and long texts among options. A part of a path may stand in other paths, too. A name, an
        address or a figure shows where it is in use.
        """
        found: dict[str, str] = {}
        for path, filled in self.filled.items():
            pairs = self.masks_of(path)
            if is_path(path):
                found |= {text: shown for text, shown in pairs if text[0] == "/" and shown == filled.written}
            if OPTIONS.intersection(path):
                found |= {text: shown for text, shown in pairs if len(text) >= LONG}
        return found

    def _place(self, path: KeyPath) -> KeyPath | None:
        """Return the path at which this file has a value; None if it comes from elsewhere."""
        prefixes = [path[:n] for n in range(len(path), -1, -1)]
        if (place := next((prefix for prefix in prefixes if prefix in self.moved), None)) is not None:
            return self._place((*self.moved[place], *path[len(place) :]))
        if path in self.defaults or any(prefix in self.variables for prefix in prefixes):
            return None
        return path

    def _masked(self, path: KeyPath, message: str) -> str:
        """Return a message without the values of variables. Short ones are looked for in messages about their own key
        only, as a message has many a 1."""
        if not self.filled:
            return message
        if self._masks is None:
            self._masks = [(place, *pair) for place in self.filled for pair in self.masks_of(place)]
        here = self._place(path) or path
        texts = {
            text: shown
            for place, text, shown in self._masks
            if len(text) >= SHORT or place[: len(here)] == here or here[: len(place)] == place
        }
        return pattern_of(texts).sub(lambda found: texts[found[0]], message) if texts else message

    def origin(self, path: KeyPath) -> tuple[str, int] | None:
        """Return where the value of a key, or of its nearest existing parent, comes from.

        Return (variable, 0) or (file, line); None if the file is empty.
        """
        prefixes = [path[:n] for n in range(len(path), -1, -1)]
        if (place := next((prefix for prefix in prefixes if prefix in self.moved), None)) is not None:
            return self.origin((*self.moved[place], *path[len(place) :]))
        # A variable replaces the whole value of its key, so lines of the file below that key count no more.
        name = next((self.variables[prefix] for prefix in prefixes if prefix in self.variables), None)
        if name is not None:
            return name, 0
        if (default := self.defaults.get(path)) is not None:
            return default
        line = next((self._lines[prefix] for prefix in prefixes if prefix in self._lines), None)
        return None if line is None else (self.file, line)

    def _parse(self, raw: bytes) -> Any:
        loader: _Loader | None = None
        try:
            loader = _Loader(raw)
            node = loader.get_single_node()
            return self._build(loader, node, ()) if node is not None else {}
        except yaml.MarkedYAMLError as e:
            mark = e.problem_mark or e.context_mark
            line = mark.line + 1 if mark else 0
            raise ConfigError([Problem(self.file, line, "", f"is not YAML: {e.problem or e.context}")]) from None
        except Exception as e:  # PyYAML may raise anything while it parses unusual scalars
            message = " ".join(str(e).split()) or type(e).__name__
            raise ConfigError([Problem(self.file, 0, "", f"is not YAML: {message}")]) from None
        finally:
            if loader is not None:
                loader.dispose()

    def _build(self, loader: _Loader, node: yaml.Node, path: KeyPath) -> Any:
        self._nodes += 1
        if self._nodes > MAX_NODES:
            raise ValueError(f"more than {MAX_NODES} values, aliases expanded")
        self._lines.setdefault(path, node.start_mark.line + 1)
        if node.tag != _PLAIN_TAGS.get(type(node), node.tag):
            raise yaml.MarkedYAMLError(problem=f"the tag {node.tag!r} means nothing here", problem_mark=node.start_mark)
        if isinstance(node, yaml.MappingNode):
            return self._build_mapping(loader, node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self._build(loader, child, (*path, i)) for i, child in enumerate(node.value)]
        if self._environment is not None and isinstance(node, yaml.ScalarNode):
            try:
                filled = fill(node.value, self._environment)
            except UnknownVariable as e:
                if not str(path[0] if path else "").startswith(NOTE_PREFIX):
                    line = node.start_mark.line + 1
                    self.problems.append(Problem(self.file, line, ".".join(map(str, path)), str(e)))
                self.unfilled.add(path)
                return node.value
            if filled is not None:
                self.filled[path] = filled
                return plain_value(filled.text) if node.style is None else Quoted(filled.text)
        return loader.construct_object(node)

    def _build_mapping(self, loader: _Loader, node: yaml.MappingNode, path: KeyPath) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                line = key_node.start_mark.line + 1
                if key_node.value in seen:
                    message = f"stands here and in line {seen[key_node.value]}; each name may stand once"
                    self.problems.append(Problem(self.file, line, ".".join(map(str, (*path, key_node.value))), message))
                seen[key_node.value] = line
        loader.flatten_mapping(node)
        built: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node)
            if not isinstance(key, (str, int, float, bool)):
                raise yaml.MarkedYAMLError(problem="a key is not a plain word", problem_mark=key_node.start_mark)
            name = key if isinstance(key, str) else key_node.value
            self._lines[(*path, name)] = key_node.start_mark.line + 1
            built[name] = self._build(loader, value_node, (*path, name))
        return built
