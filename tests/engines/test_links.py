"""Links that lead out of a model's directory: which are followed, and that no other file is ever read."""

import json
import os
import shutil
import struct
import threading
from pathlib import Path

import pytest

from model_worker.engine import LoadError
from model_worker.engines.embedded.check import check
from model_worker.engines.model_dir import ModelDir, read_header
from model_worker.engines.vetting import Bounds, open_file, read_json
from protocol.process.worker_spec import EngineSpec, WorkerSpec, pack_spec, unpack_spec
from tests.engines.hostile_directories import DEMO

KEY = "-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEAAAAA\n"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    shutil.copytree(DEMO, tmp_path / "model")
    (tmp_path / "disk").mkdir(mode=0o755)
    return tmp_path / "model"


def move(model: Path, name: str) -> Path:
    """Move a file to another directory, and put a link in its place. Return the file."""
    target = model.parent / "disk" / name
    (model / name).rename(target)
    (model / name).symlink_to(target)
    return target


def refused(model: Path, *words: str) -> str:
    with pytest.raises(LoadError) as caught:
        ModelDir(str(model))
    message = "; ".join(map(str, (caught.value, *caught.value.also)))
    for word in words:
        assert word in message, message
    return message


def test_weights_may_be_on_another_disk(model: Path) -> None:
    target = move(model, "model.safetensors")
    assert ModelDir(str(model)).tensors
    (model.parent / "disk" / "second").symlink_to(target)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to("../disk/second")  # relative, and a link to a link
    assert ModelDir(str(model)).tensors


@pytest.mark.parametrize("place", ["", "model.safetensors"])
def test_what_others_can_write_to_is_refused(model: Path, place: str) -> None:
    move(model, "model.safetensors")
    weak = model.parent / "disk" / place
    for mode in (0o777, 0o757):
        weak.chmod(mode)
        refused(model, "model.safetensors is a link to", f"others can write to {weak}".rstrip("/"), "model_roots")
    weak.chmod(0o755)
    ModelDir(str(model))


def test_a_group_may_write_only_if_it_is_the_users_own(model: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to give a file to another group")
    target = move(model, "model.safetensors")
    target.chmod(0o664)
    ModelDir(str(model))  # the group root has no members but root
    os.chown(target, 0, 4321)
    refused(model, "others can write to", "mode 664")
    os.chown(target, 4321, 0)
    target.chmod(0o644)
    refused(model, "belongs to another user (4321)")


def test_a_directory_on_the_way_must_be_safe_too(model: Path) -> None:
    """The target and its directories are safe, but others could exchange the second link."""
    target = move(model, "model.safetensors")
    open_to_all = model.parent / "all"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    (open_to_all / "link").symlink_to(target)
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").symlink_to(open_to_all / "link")
    refused(model, f"others can write to {open_to_all}")
    open_to_all.chmod(0o1777)  # with the sticky bit, others cannot exchange it
    ModelDir(str(model))


def test_other_files_need_a_root(model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        move(model, name)
    (tmp_path / "disk").chmod(0o777)  # the roots are trusted
    refused(model, "is a link to", "supervisor.model_roots")
    roots = (str(tmp_path / "disk"),)
    assert ModelDir(str(model), roots).tensors
    spec = EngineSpec("m", "transformers", str(model), model_roots=roots)
    assert unpack_spec(pack_spec(WorkerSpec(spec, 1, "", "", b"", "", 1))).engine == spec
    assert check(spec).directory.tensors


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"])
def test_a_key_file_is_never_shown(model: Path, name: str) -> None:
    secret = model.parent / "id_ed25519"
    for content in (KEY.encode(), b"\xff\xfe" + KEY.encode(), struct.pack("<Q", 20) + KEY.encode()):
        secret.write_bytes(content)
        secret.chmod(0o600)
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(secret)
        message = refused(model, name)
        assert not any(word in message for word in ("BEGIN", "OPENSSH", "b3Blb", "0xff"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_the_passwords_of_the_machine_are_never_shown(model: Path, name: str) -> None:
    shadow = Path("/etc/shadow")
    if not os.access(shadow, os.R_OK):
        pytest.skip("needs root, who can read /etc/shadow")
    (model / name).unlink()
    (model / name).symlink_to(shadow)
    message = refused(model, name)
    assert not any(line in message for line in shadow.read_text().split("\n") if line)
    assert "root:" not in message


def test_directories_of_older_downloads(model: Path, tmp_path: Path) -> None:
    """Their files are links to the cache of the hub, wherever the directory is."""
    blobs = tmp_path / "hub" / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(file for file in model.iterdir() if file.is_file())):
        file.rename(blobs / f"{number:040x}")
        file.symlink_to(blobs / f"{number:040x}")
    assert ModelDir(str(model)).tensors
    (blobs / "secret").write_text(KEY)
    (model / "config.json").unlink()
    (model / "config.json").symlink_to(blobs / "secret")
    refused(model, "config.json is a link to")


def test_an_exchange_between_check_and_read_is_of_no_use(model: Path, tmp_path: Path) -> None:
    """A thread exchanges the file all the time. Each read gets the good file, or is refused."""
    secret = tmp_path / "secret.json"
    secret.write_text(json.dumps({"secret": KEY}))
    good, file, spare = model / "good.json", model / "config.json", model / "spare"
    file.rename(good)
    os.link(good, file)
    done = threading.Event()

    def exchange() -> None:
        while not done.is_set():
            spare.symlink_to(secret)
            spare.replace(file)
            os.link(good, spare)
            spare.replace(file)

    thread = threading.Thread(target=exchange)
    thread.start()
    outcomes = set()
    try:
        for number in range(1_000_000):
            if number > 3000 and len(outcomes) > 1:
                break
            try:
                outcomes.add("secret" if "secret" in read_json(file) else "read")
            except LoadError as e:
                outcomes.add("secret" if "BEGIN" in str(e) else "refused")
    finally:
        done.set()
        thread.join()
    assert outcomes == {"read", "refused"}


def test_what_was_opened_is_what_is_read(model: Path, tmp_path: Path) -> None:
    """The entry is exchanged after it was opened and checked."""
    file = model / "config.json"
    with open(open_file(file, Bounds.of(model))) as opened:
        (tmp_path / "secret").write_text(KEY)
        (tmp_path / "link").symlink_to(tmp_path / "secret")
        (tmp_path / "link").replace(file)
        assert "BEGIN" not in opened.read()
    with pytest.raises(LoadError, match="is a link to"):
        open_file(file, Bounds.of(model))
    weights = model / "model.safetensors"
    weights.unlink()
    weights.symlink_to("/dev/zero")
    with pytest.raises(LoadError, match="/dev/zero"):
        read_header(weights)
