"""Which models the folders of a models.yaml give: quiet directories, names, and folders that cannot be read."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from supervisor.config.folders import (
    CheckResult,
    FolderListing,
    FolderModels,
    FoundModel,
    ModelDirectory,
    Picture,
    list_folder,
)

ROOT = Path("/data/models")
QUIET_S = 30.0
WALL = 1_000_000.0
FINE = CheckResult({"max_seq_len": 16384})


def seen(name: str, *, age: float = 1000.0, size: int = 1, weakness: str | None = None) -> ModelDirectory:
    return ModelDirectory(ROOT / name, (("config.json", size, 0, 0, 0),), WALL - age, weakness)


def listing(*models: ModelDirectory, device: int | None = 1, empty: bool = False, whole: bool = True) -> FolderListing:
    return FolderListing(ROOT, device, empty, models, whole=whole)


class Folder:
    """The folder ``ROOT``, with a clock that the test sets."""

    def __init__(
        self,
        names: Mapping[str, str] | None = None,
        directories: Sequence[Path] = (),
        served: Mapping[str, Path] | None = None,
    ) -> None:
        self.models = FolderModels(names or {}, directories, served or {}, QUIET_S)

    def look(self, *listings: FolderListing, after: float = 0.0) -> list[str]:
        """Take in listings. Return the names of the models that are to be checked."""
        self.models.look(listings, WALL + after, 50.0 + after)
        return [model.name for model in self.models.due()]

    def check(self, verdict: CheckResult = FINE) -> None:
        for model in self.models.due():
            self.models.judge(model.directory, verdict)

    @property
    def picture(self) -> Picture:
        return self.models.picture()

    @property
    def names(self) -> list[str]:
        return [model.name for model in self.picture.models]


def test_a_directory_that_is_old_is_a_model_at_once() -> None:
    folder = Folder()
    assert folder.look(listing(seen("A"))) == ["a"]
    assert folder.names == [], "not before it is checked"
    folder.check()
    assert folder.look(listing(seen("A"))) == [], "it is checked once"
    assert folder.picture.models == [FoundModel("a", ROOT / "A", 0, {"max_seq_len": 16384})]


def test_a_download_becomes_a_model_when_nothing_has_changed_for_the_quiet_time() -> None:
    folder = Folder()
    assert folder.look(listing(seen("A", age=1.0))) == []
    assert folder.look(listing(seen("A", age=-9.0, size=2)), after=10.0) == []
    (why,) = folder.picture.waiting.values()
    assert why == "its files changed less than 30 s ago: a download may go on"
    assert folder.look(listing(seen("A", age=-9.0, size=2)), after=39.0) == []
    assert folder.look(listing(seen("A", age=-9.0, size=2)), after=40.0) == ["a"]


@pytest.mark.parametrize("ahead", [-86400.0, 86400.0])
def test_the_clock_of_a_file_server_may_be_wrong(ahead: float) -> None:
    """The age of files counts at the first sight only. Later, a change is what differs between two looks."""
    folder = Folder()
    due = folder.look(listing(seen("A", age=-ahead)))
    assert due == ([] if ahead > 0 else ["a"])
    folder.check(CheckResult(None, "it lacks a file"))
    assert folder.look(listing(seen("A", age=-ahead - 5.0, size=2)), after=10.0) == []
    assert folder.look(listing(seen("A", age=-ahead - 5.0, size=2)), after=39.0) == []
    assert folder.look(listing(seen("A", age=-ahead - 5.0, size=2)), after=40.0) == ["a"]


def test_a_model_stays_while_its_files_change_and_goes_with_its_directory() -> None:
    folder = Folder()
    folder.look(listing(seen("A"), seen("B")))
    folder.check()
    assert folder.look(listing(seen("A", age=0.0, size=2), seen("B", weakness="w"))) == []
    assert folder.names == ["a", "b"]
    folder.look(listing(seen("B")))
    assert folder.names == ["b"]


def test_a_directory_that_failed_its_check_is_checked_again_when_its_files_have_changed() -> None:
    folder = Folder()
    folder.look(listing(seen("A")))
    folder.check(CheckResult(None, "it lacks a file"))
    assert folder.look(listing(seen("A")), after=100.0) == []
    assert folder.picture.refused == {"/data/models/A": "it lacks a file"}
    assert folder.look(listing(seen("A", size=2)), after=110.0) == []
    assert folder.look(listing(seen("A", size=2)), after=140.0) == ["a"]
    folder.check()
    assert (folder.names, folder.picture.refused) == (["a"], {})


def test_a_check_that_could_not_be_made_is_repeated() -> None:
    folder = Folder()
    folder.look(listing(seen("A")))
    folder.check(CheckResult(None, "its file system does not answer", final=False))
    assert folder.picture.refused
    assert folder.look(listing(seen("A"))) == ["a"]


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            {"a": "the name of a model in models.yaml"},
            "is the name of a model in models.yaml: rename the directory, or ",
        ),
        ({"a": "a name of qwen"}, "its name would be a, which is a name of qwen: "),
    ],
)
def test_names_of_models_yaml_win(names: dict[str, str], says: str) -> None:
    folder = Folder(names)
    assert folder.look(listing(seen("A"), seen("B"))) == ["b"]
    assert says in folder.picture.refused["/data/models/A"]


def test_of_two_directories_with_one_name_the_first_has_it_and_one_that_is_served_keeps_it() -> None:
    folder = Folder()
    assert folder.look(listing(seen("X/A"), seen("Y/A"))) == ["a"]
    folder.check()
    assert folder.look(listing(seen("B/A"), seen("X/A"), seen("Y/A"))) == []
    assert [model.directory for model in folder.picture.models] == [ROOT / "X/A"]
    assert set(folder.picture.refused) == {"/data/models/B/A", "/data/models/Y/A"}
    assert "which is the name of /data/models/X/A" in folder.picture.refused["/data/models/B/A"]
    assert folder.look(listing(seen("B/A"), seen("Y/A"))) == ["a"], "the name is free again"


def test_a_directory_with_an_entry_of_its_own_is_no_second_model() -> None:
    folder = Folder({"mine": "the name of a model in models.yaml"}, [ROOT / "A"])
    assert folder.look(listing(seen("A"))) == []
    assert (folder.picture.refused, folder.picture.waiting) == ({}, {})


def test_a_directory_that_others_can_change_is_not_served() -> None:
    folder = Folder()
    assert folder.look(listing(seen("A", weakness="others can write to /data/models/A (mode 777)"))) == []
    says = "others can write to /data/models/A (mode 777): let only this user and root change it, or give the model an "
    assert folder.picture.refused["/data/models/A"].startswith(says)


def test_models_stay_while_their_folder_cannot_be_read() -> None:
    folder = Folder()
    folder.look(listing(seen("A"), seen("deep/B")))
    folder.check()
    unreadable = FolderListing(ROOT, None, unread={str(ROOT): "Stale file handle"})
    folder.look(unreadable)
    assert (folder.names, folder.picture.unread) == (["a", "b"], {"/data/models": "Stale file handle"})
    folder.look(FolderListing(ROOT, 1, models=[seen("A")], unread={"/data/models/deep": "Permission denied"}))
    assert folder.names == ["a", "b"]
    folder.look(listing(seen("A"), whole=False))
    assert folder.names == ["a", "b"], "the search ended before it was everywhere"
    folder.look(listing(device=2, empty=True))
    assert folder.names == ["a", "b"], "the mount point of a share that is away"
    assert "another file system was there" in folder.picture.unread["/data/models"]
    folder.look(listing(empty=True))
    assert folder.names == []


def test_after_a_reload_the_served_models_are_kept_until_they_are_checked() -> None:
    folder = Folder(served={"a": ROOT / "A", "b": ROOT / "B", "c": ROOT / "C"})
    due = folder.look(listing(seen("A", age=0.0), seen("B")))
    assert due == ["a", "b"], "also one whose files have just changed"
    assert sorted(folder.picture.kept) == ["a", "b"], "c is gone"
    folder.models.judge(ROOT / "A", FINE)
    folder.models.judge(ROOT / "B", CheckResult(None, "its file system does not answer", final=False))
    assert (folder.names, folder.picture.kept) == (["a"], ["b"])
    folder.models.judge(ROOT / "B", CheckResult(None, "no"))
    assert (folder.names, folder.picture.kept, folder.picture.refused) == (["a"], [], {"/data/models/B": "no"})


def model(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (directory / name).write_text("{}")
    return directory


def test_what_is_read_of_a_folder(tmp_path: Path) -> None:
    first, second = model(tmp_path / "m" / "A"), model(tmp_path / "m" / "B-exl2" / "4.0bpw")
    (tmp_path / "link").symlink_to(tmp_path / "m")
    found = list_folder(tmp_path / "link")
    assert [one.directory for one in found.models] == [first, second]
    assert (found.folder, found.unread, found.empty) == (tmp_path / "m", {}, False)
    os.utime(second / "config.json", (1, 1))
    again = list_folder(tmp_path / "m")
    assert again.models[0] == found.models[0]
    assert again.models[1].stamp != found.models[1].stamp
    assert again.models[1].changed >= found.models[1].changed, "the time of the change counts, which cannot be set back"
    (first / "model.safetensors").unlink()
    assert [one.directory for one in list_folder(tmp_path / "m").models] == [second]
    missing = list_folder(tmp_path / "away")
    assert (missing.device, missing.unread) == (None, {str(tmp_path / "away"): "No such file or directory"})


@pytest.mark.parametrize("place", ["", "B-exl2", "B-exl2/4.0bpw", "B-exl2/4.0bpw/config.json"])
def test_others_must_not_be_able_to_write_anywhere_below_the_folder(tmp_path: Path, place: str) -> None:
    folder = tmp_path / "m"
    model(folder / "B-exl2" / "4.0bpw")
    assert [one.weakness for one in list_folder(folder).models] == [None]
    (folder / place).chmod(0o777)
    assert [one.weakness for one in list_folder(folder).models] == [f"others can write to {folder / place} (mode 777)"]


@pytest.mark.parametrize("name", [b"bad\xff", b"two\nlines", b"\x1b[31mred", "\u2028".encode(), b"\x7f"])
def test_a_path_that_no_log_can_show_is_refused_by_a_name_that_can_be_shown(name: bytes) -> None:
    directory = os.fsdecode(name)
    folder = Folder()
    assert folder.look(listing(seen(directory), seen("A"))) == ["a"]
    ((place, why),) = folder.picture.refused.items()
    assert "rename the directory" in why
    assert place.isprintable()
    folder.look(FolderListing(ROOT, 1, unread={str(ROOT / directory): "no"}))
    assert all(place.isprintable() for place in folder.picture.unread)


def test_a_link_that_leads_nowhere_hides_no_model_beside_it(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "A").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "A" / name).touch()
    found = list_folder(tmp_path)
    assert ([seen.directory.name for seen in found.models], dict(found.unread)) == (["A"], {})


def test_an_entry_that_cannot_be_looked_at_hides_no_model_beside_it(tmp_path: Path) -> None:
    (tmp_path / "A").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "A" / name).touch()
    (tmp_path / "long").symlink_to("x" * 300)
    found = list_folder(tmp_path)
    assert [seen.directory.name for seen in found.models] == ["A"]
    assert dict(found.unread) == {str(tmp_path / "long"): "File name too long"}
