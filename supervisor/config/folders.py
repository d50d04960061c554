"""Decide which models the folders of a models.yaml give now (``folders``). Pure, except ``list_folder``.

A directory becomes a model when it has been quiet for ``QUIET_S``: a download in progress must not be loaded. Then it
is checked once, and again when its files have changed. A model stays until its directory is gone, whatever happens to
the files: its worker checks them when it loads. A folder that cannot be read says nothing about its models.
"""

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from protocol.process.paths import shown, weakness
from supervisor.config.model_search import SearchResult, find_models, name_of
from supervisor.config.models import SECTION as DEFAULTS
from supervisor.config.models import ModelConfig, sound_defaults
from supervisor.config.yaml_source import KeyPath, YamlSource

# The section ``folders`` of a models.yaml: models that were found below a directory become entries of the file. Pure.
#
# A found model has the keys of its folder's ``defaults``, then those of the file's ``defaults``, then those of its own
# ``tabby_config.yml``, and beneath all of them the keys that suit it (``FoundModel.keys``). It is always lazy.


SECTION: Final = "folders"


@dataclass(frozen=True)
class Folder:
    """A folder whose models are served.

    engine  the engine of its models
    """

    path: Path
    engine: str


@dataclass(frozen=True)
class FoundModel:
    """A model that was found below a folder.

    folder  the number of the folder in the file
    keys    keys that suit the model, for what no other place sets
    """

    name: str
    directory: Path
    folder: int
    keys: Mapping[str, Any] = field(default_factory=dict)


def lay_folders(source: YamlSource, found: Iterable[FoundModel]) -> None:
    """Write the folders as a list of maps, and add the found models to the models of the file.

    Keys of a folder's ``defaults`` that no model could have become problems of ``source``, and are added to none.
    """
    if not isinstance(source.data, dict) or (given := source.data.get(SECTION)) is None:
        return
    listed = given if isinstance(given, list) else [given]
    folders = [{"path": one} if isinstance(one, str) else one for one in listed]
    for index, one in enumerate(listed):
        if isinstance(one, str):
            source.moved[SECTION, index, "path"] = (SECTION, index) if isinstance(given, list) else (SECTION,)
    source.data[SECTION] = folders
    if source.data.get("models") is None:
        source.data["models"] = {}
    if not folders:
        source.problems.append(source.problem((SECTION,), "names no folder; add one, or remove the key"))
    defaults: list[dict[str, Any]] = []
    for index, folder in enumerate(folders):
        own = folder.get(DEFAULTS) if isinstance(folder, dict) else None
        defaults.append({} if own is None else sound_defaults(source, (SECTION, index, DEFAULTS), own))
    models = source.data["models"]
    for model in found if isinstance(models, dict) else ():
        models[model.name] = {**defaults[model.folder], "model_dir": str(model.directory), "lazy": True}
        place: KeyPath = ("models", model.name)
        source.moved |= {(*place, key): (SECTION, model.folder, DEFAULTS, key) for key in defaults[model.folder]}
        source.moved |= {(*place, key): (SECTION, model.folder, "path") for key in ("model_dir", "lazy")}


def lay_suitable(source: YamlSource, found: Iterable[FoundModel]) -> None:
    """Give each found model the keys that suit it, where nothing else has set them."""
    for model in found:
        entry = source.data["models"][model.name]
        wanted = dict(model.keys)
        if (entry.get("engine") or ModelConfig.engine) == ModelConfig.engine:
            wanted.setdefault("gpu", "auto")
        if entry.get("gpu", "auto") != "auto" or entry.get("vram") is not None:
            wanted.pop("gpus", None)
        for key, value in wanted.items():
            if key == "sampling" and isinstance(own := entry.get(key), dict):
                entry[key] = {**value, **own}
            elif key not in entry:
                entry[key] = value
                source.moved["models", model.name, key] = (SECTION, model.folder, "path")


def engines_of(data: Any) -> list[str]:
    """Return the engine of each folder's models."""
    whole = data.get(DEFAULTS) if isinstance(data, dict) else None
    common = whole if isinstance(whole, dict) else {}
    engines = []
    for folder in data.get(SECTION) or () if isinstance(data, dict) else ():
        own = folder.get(DEFAULTS) if isinstance(folder, dict) else None
        engine = {**common, **(own if isinstance(own, dict) else {})}.get("engine")
        engines.append(engine if isinstance(engine, str) else ModelConfig.engine)
    return engines


QUIET_S: Final = 30.0
"""Seconds without a change of its files after which a directory is taken for complete."""
SCAN_S: Final = 10.0
"""Seconds between two looks at the folders."""

UNSHOWN: Final = "its path has characters that are no text, or control characters: rename the directory"
_NOT_SHOWN: Final = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

Stamp = tuple[tuple[str, int, int, int, int], ...]
"""Name, size, modification, change and inode of each file: what tells the files of a directory from later ones."""


@dataclass(frozen=True)
class ModelDirectory:
    """A directory that has the files of a model.

    changed   seconds since 1970 when one of its files was changed last, by the clock of its file system
    weakness  how another user of the machine could change it; None if nobody else can
    """

    directory: Path
    stamp: Stamp
    changed: float
    weakness: str | None = None


@dataclass(frozen=True)
class FolderListing:
    """The models below a folder.

    folder  its path without links
    device  the number of the folder's file system; None if the folder cannot be read
    empty   whether nothing at all is in the folder
    gguf    directories with weights in the format GGUF only
    unread  directories that could not be looked into, with the reason
    whole   False if there are more directories than one search looks into
    """

    folder: Path
    device: int | None
    empty: bool = False
    models: Sequence[ModelDirectory] = ()
    gguf: Sequence[Path] = ()
    unread: Mapping[str, str] = field(default_factory=dict)
    whole: bool = True


def list_folder(folder: Path) -> FolderListing:
    """Look for models below a folder. Only names and times are read."""
    root = Path(os.path.realpath(folder))
    try:
        device = os.stat(root).st_dev
        found = find_models(root)
        with os.scandir(root) as entries:
            empty = next(entries, None) is None
    except OSError as e:
        return FolderListing(root, None, unread={str(root): e.strerror or str(e)})
    unread = dict(found.unread)
    seen = [*_seen(found, root, unread)]
    return FolderListing(root, device, empty, seen, found.gguf, unread, found.complete)


def _seen(found: SearchResult, root: Path, unread: dict[str, str]) -> Iterator[ModelDirectory]:
    for directory in found.models:
        try:
            files = []
            weak = next(filter(None, map(weakness, _places(directory, root))), None)
            with os.scandir(directory) as entries:
                for entry in entries:
                    weak = weak or weakness(entry.path, entry.stat(follow_symlinks=False))
                    status = entry.stat()
                    if entry.is_file():
                        files.append((entry.name, status))
        except OSError as e:  # it is being removed, or it has a link whose target is not there yet
            unread[str(directory)] = e.strerror or str(e)
            continue
        stamp = tuple(sorted((n, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for n, s in files))
        yield ModelDirectory(directory, stamp, max((max(s.st_mtime, s.st_ctime) for _, s in files), default=0.0), weak)


def _places(directory: Path, root: Path) -> Iterator[str]:
    """Yield every place at which another user could put other files into a model's directory."""
    for place in (directory, *directory.parents):
        yield str(place)
        if place == root:
            break
    if directory.is_symlink():
        target = directory.resolve()
        yield from map(str, (target, *target.parents))


@dataclass(frozen=True)
class CheckResult:
    """The result of the check of a directory.

    keys   keys that suit the model; None if it cannot be served
    why    the reason, if it cannot be served
    final  whether the check need not be repeated until the files have changed
    """

    keys: Mapping[str, Any] | None
    why: str = ""
    final: bool = True


@dataclass(frozen=True)
class Picture:
    """The models that the folders give.

    Paths are as ``shown`` writes them: a name of a file need not be text, and can have control characters.

    models   those that are served
    kept     names of models that were served before, and that cannot be judged now: they stay as they are
    refused  directories that are not served, with the reason
    waiting  directories that are not quiet yet, with the reason
    unread   folders, and directories below them, that cannot be read, with the reason
    """

    models: Sequence[FoundModel]
    kept: Sequence[str]
    refused: Mapping[str, str]
    waiting: Mapping[str, str]
    unread: Mapping[str, str]


class FolderModels:
    """What is known of the directories below the folders of one models.yaml.

    names        the names that the file gives to its own models, with what each is
    directories  the directories of these models, and of their draft models
    served       the models of folders that are served already: name → directory
    """

    def __init__(
        self,
        names: Mapping[str, str],
        directories: Collection[Path],
        served: Mapping[str, Path],
        quiet_s: float = QUIET_S,
    ) -> None:
        self._own, self._directories, self._quiet_s = names, directories, quiet_s
        self._served = {directory: name for name, directory in served.items()}
        self._there: dict[Path, tuple[int, ModelDirectory]] = {}
        self._quiet_since: dict[Path, float] = {}
        self._good: dict[Path, tuple[int, Mapping[str, Any]]] = {}
        self._bad: dict[Path, tuple[Stamp, str]] = {}
        self._devices: dict[Path, int] = {}
        self._gguf: list[Path] = []
        self._unread: dict[str, str] = {}
        self._steady = 0.0

    def look(self, listings: Sequence[FolderListing], wall: float, steady: float) -> None:
        """Take in what the folders have now.

        wall    seconds since 1970
        steady  seconds of a clock that nobody sets
        """
        self._steady = steady
        there: dict[Path, tuple[int, ModelDirectory]] = {}
        for index, listing in enumerate(listings):
            for seen in listing.models:
                there.setdefault(seen.directory, (index, seen))
        for directory, (_, seen) in there.items():
            before = self._there.get(directory)
            if before is None:
                # The clock of a file server may be ahead, but its files' age counts only at the first sight.
                age = self._quiet_s if directory in self._served else wall - seen.changed
                self._quiet_since[directory] = steady - min(max(0.0, age), self._quiet_s)
            elif before[1].stamp != seen.stamp:
                self._quiet_since[directory] = steady
        unread = {place: why for listing in listings for place, why in listing.unread.items()}
        away = [listing for listing in listings if self._is_away(listing)]
        unread |= {str(listing.folder): "it is empty, and another file system was there" for listing in away}
        for directory in [directory for directory in {*self._good, *self._served} if directory not in there]:
            if self._may_be_there(directory, listings, unread):
                if directory in self._there:
                    there[directory] = self._there[directory]
            else:
                self._good.pop(directory, None)
                self._served.pop(directory, None)
        for listing in listings:
            if listing.models and listing.device is not None:
                self._devices[listing.folder] = listing.device
        self._there, self._unread = there, unread
        self._gguf = [path for listing in listings for path in listing.gguf]
        self._bad = {directory: bad for directory, bad in self._bad.items() if directory in there}

    def due(self) -> list[FoundModel]:
        """Return the models that are to be checked now, with their names."""
        names, _ = self._names()
        due = [directory for directory in self._wanted() if directory in names and directory not in self._good]
        return [FoundModel(names[directory], directory, self._there[directory][0]) for directory in due]

    def judge(self, directory: Path, verdict: CheckResult) -> None:
        """Take in the result of a check."""
        index, seen = self._there[directory]
        if verdict.keys is not None:
            self._good[directory] = (index, verdict.keys)
            self._bad.pop(directory, None)
            self._served.pop(directory, None)
        elif verdict.final or directory not in self._served:
            self._bad[directory] = (seen.stamp if verdict.final else (), verdict.why)
            self._served.pop(directory, None)

    def picture(self) -> Picture:
        """Return the models that the folders give now."""
        names, clashes = self._names()
        models = [FoundModel(names[d], d, *self._good[d]) for d in sorted(self._good) if d in names]
        kept = [name for directory, name in self._served.items() if directory not in self._good]
        refused = {shown(directory): why for directory, (_, why) in self._bad.items()} | clashes
        others = {d: seen for d, (_, seen) in self._there.items() if d not in self._good and d not in self._directories}
        remedy = "let only this user and root change it, or give the model an entry in models.yaml"
        refused |= {shown(d): f"{seen.weakness}: {remedy}" for d, seen in others.items() if seen.weakness}
        refused |= {shown(d): UNSHOWN for d in others if not _can_be_shown(d)}
        refused |= {shown(path): "it has GGUF weights, which no engine here loads" for path in self._gguf}
        waiting = {
            shown(directory): f"its files changed less than {self._quiet_s:g} s ago: a download may go on"
            for directory in others
            if not self._is_quiet(directory) and shown(directory) not in refused
        }
        unread = {shown(place): why for place, why in self._unread.items()}
        return Picture(models, kept, refused, waiting, unread)

    def _wanted(self) -> list[Path]:
        """Return the directories that may be served, unless their check or their name forbids it."""
        return [
            directory
            for directory, (_, seen) in sorted(self._there.items())
            if directory not in self._directories
            and _can_be_shown(directory)
            and (
                directory in self._good
                or (self._is_quiet(directory) and not seen.weakness and not self._is_bad(directory, seen))
            )
        ]

    def _is_quiet(self, directory: Path) -> bool:
        return self._steady - self._quiet_since.get(directory, self._steady) >= self._quiet_s

    def _is_bad(self, directory: Path, seen: ModelDirectory) -> bool:
        return directory in self._bad and self._bad[directory][0] == seen.stamp

    def _names(self) -> tuple[dict[Path, str], dict[str, str]]:
        """Return the names of the directories that may be served, and the directories without one, with the reason.

        A model that is served keeps its name. Else the first directory has it.
        """
        taken, names, clashes = dict(self._own), {}, {}
        for directory in sorted(self._wanted(), key=lambda each: each not in self._good and each not in self._served):
            name = name_of(directory, ())
            if name in taken:
                clashes[shown(directory)] = (
                    f"its name would be {name}, which is {taken[name]}: rename the directory, or give it an entry with "
                    "another name in models.yaml"
                )
                continue
            taken[name], names[directory] = f"the name of {directory}", name
        return names, clashes

    def _is_away(self, listing: FolderListing) -> bool:
        """Return whether a folder is only the empty mount point of the file system that it had."""
        return listing.empty and listing.device != self._devices.get(listing.folder, listing.device)

    @staticmethod
    def _may_be_there(directory: Path, listings: Sequence[FolderListing], unread: Mapping[str, str]) -> bool:
        """Return whether a directory that was not seen may be there all the same."""
        if any(directory.is_relative_to(place) for place in unread):
            return True
        return any(not listing.whole and directory.is_relative_to(listing.folder) for listing in listings)


def _can_be_shown(directory: Path) -> bool:
    """Return whether a path is text without control characters, as every answer, log and terminal needs it."""
    return not _NOT_SHOWN.search(str(directory))
