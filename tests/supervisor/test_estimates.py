"""A real process reads models' directories and estimates their memory correctly."""

import errno
import json
import os
import shutil
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from model_worker.engine import LoadError
from model_worker.engines.exllamav2.vram import estimate
from model_worker.engines.vetting import is_away
from protocol.process.worker_spec import EngineSpec
from supervisor.config.file import load_config
from supervisor.config.yaml_source import ConfigError
from supervisor.placement import estimates
from supervisor.placement.estimates import Estimated, Estimator, Fault, Question, ask_now
from supervisor.placement.policy import Needs
from supervisor.reactor import Timers
from tests.hanging_files import hanging_file
from tests.serving import wait_until
from tools.demo_models import directory

DEMO = directory("letters")


def spec(directory: Path | str, engine: str = "exllamav2") -> EngineSpec:
    return EngineSpec("m", engine, str(directory), device="cuda", options={"cache_mode": "Q8"})


def with_header(directory: Path, header: bytes) -> Path:
    """Make the demo model with other weights."""
    shutil.copytree(DEMO, directory)
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return directory


def test_answers_are_the_engines_own_and_errors_are_lines(tmp_path: Path) -> None:
    nested = with_header(tmp_path / "nested", b'{"a":' * 200_000)
    asked = [spec(DEMO), spec(tmp_path / "none"), spec(nested), EngineSpec("m", "transformers", str(DEMO))]
    good, none, deep, other = ask_now([Question(one, counts=(1, 2)) for one in asked])
    assert good.needs is not None
    for count in (1, 2):
        theirs = estimate(asked[0], count)
        assert good.needs[count] == Needs(
            theirs.weights, theirs.cache, theirs.draft, theirs.workspace, theirs.per_gpu
        )  # fmt: skip
        assert good.needs[count].total(count) == theirs.total + count * (612 << 20)
    missing = Fault("model_dir", f"model_dir {tmp_path / 'none'} is no directory")
    assert none == Estimated(faults=(missing,), retry=True, away=True)
    assert none.error == f"model_dir {tmp_path / 'none'} is no directory"
    assert deep.error is not None
    assert "\n" not in deep.error
    assert other.unknown == "there is no estimate for engine transformers"
    weights = estimate(asked[0]).weights
    assert good.sleep_bytes == weights
    assert other.sleep_bytes is not None
    assert other.sleep_bytes > weights, "32 bits a weight, where exllamav2 has 16"


def test_host_memory_counts_the_draft_model_and_the_kept_prompts_and_not_models_on_two_gpus() -> None:
    options = {"draft_model": str(DEMO), "sleep_cache": 1 << 30}
    both = EngineSpec("m", "exllamav2", str(DEMO), device="cuda", options=options)
    drafted, split = ask_now([Question(both), Question(spec(DEMO), counts=(2,))])
    assert drafted.sleep_bytes == 2 * estimate(spec(DEMO)).weights + (1 << 30)
    assert (split.sleep_bytes, split.error) == (0, None)


class Asking:
    """An Estimator with a loop of its own."""

    def __init__(self) -> None:
        self.timers = Timers()
        self.estimator = Estimator(self.timers)
        self.message: list[Estimated] = []

    def turn(self) -> list[Estimated]:
        import time

        self.estimator.ended()
        for timer in self.timers.due(time.monotonic()):
            if not timer.cancelled:
                timer.callback()
        return self.message


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Path]:
    """Make a model's directory that takes for ever to read."""
    shutil.copytree(DEMO, tmp_path / "hanging")
    with hanging_file(tmp_path / "hanging" / "model.safetensors"):
        yield tmp_path / "hanging"


def test_what_takes_too_long_is_ended_and_may_be_tried_again(hanging: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimates, "ESTIMATE_S", 0.2)
    before = set(os.listdir("/proc/self/fd"))
    asking = Asking()
    asking.estimator.ask("m", Question(spec(hanging)), asking.message.append)
    (reported,) = wait_until(asking.turn, 30)
    assert (reported.retry, reported.needs) == (True, None)
    assert reported.error is not None
    assert "could not be read within" in reported.error
    wait_until(lambda: not asking.turn() or not asking.estimator._running, 30)
    assert ask_now([Question(spec(hanging))] * 2) == [reported, reported]
    asking.estimator._epoll.close()
    assert set(os.listdir("/proc/self/fd")) == before
    assert len(asking.message) == 1


def test_files_that_are_away_may_be_tried_again_and_wrong_ones_may_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "notes.txt").write_text("no model")
    lora = EngineSpec("m", "exllamav2", str(DEMO), device="cuda", options={"lora": [{"dir": str(tmp_path / "gone")}]})
    specs = [spec(tmp_path / "gone"), spec(tmp_path / "gone", "transformers"), spec(tmp_path / "empty"), lora]
    for answer in ask_now([Question(one) for one in specs]):
        assert (answer.reason, answer.retry, bool(answer.error)) == ("away", True, True), answer
    (answer,) = ask_now([Question(spec(tmp_path / "wrong"))])
    assert (answer.reason, answer.retry) == ("config", False)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.ENOTCONN, errno.ETIMEDOUT])
def test_what_a_file_system_that_is_away_answers_is_told_apart(number: int) -> None:
    def wrapped(number: int) -> LoadError:
        try:
            try:
                raise OSError(number, os.strerror(number))
            except OSError as e:
                raise ValueError(e.strerror) from None
        except ValueError as e:
            try:
                raise LoadError(f"config.json cannot be read: {e}") from None
            except LoadError as error:
                return error

    there = spec(DEMO)
    assert is_away(wrapped(number), there)
    assert is_away(LoadError("one fault", also=[wrapped(number)]), there)
    assert not is_away(wrapped(errno.EACCES), there)
    assert not is_away(LoadError("config.json is no JSON"), there)
    assert not is_away(LoadError("unknown engine", key="engine"), spec("/nowhere"))


def test_a_question_that_is_forgotten_is_not_answered(hanging: Path) -> None:
    asking = Asking()
    asking.estimator.ask("m", Question(spec(hanging)), asking.message.append)
    assert asking.estimator.forget("m")
    assert not asking.estimator.forget("m")
    wait_until(lambda: asking.turn() or not asking.estimator._running, 30)
    # a reader that is killed from outside gives an error that says so
    asking.estimator.ask("m", Question(spec(hanging)), asking.message.append)
    os.kill(next(iter(asking.estimator._running.values())).process.pid, signal.SIGKILL)
    (reported,) = wait_until(asking.turn, 30)
    assert (reported.error, reported.retry) == (
        "the process that reads its files ended (signal 9) without an answer",
        True,
    )
    asking.estimator._epoll.close()


def test_an_answer_that_is_cut_off_is_none(tmp_path: Path) -> None:
    file = tmp_path / "answers"
    file.write_text(json.dumps({"needs": {"1": {"weights": 5}}}) + '\n{"needs": {"1"')
    (first,) = estimates.answers(os.open(file, os.O_RDONLY))
    assert first.needs == {1: Needs(weights=5)}


def test_links_into_the_roots_of_models_yaml_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    shutil.copytree(DEMO, tmp_path / "model")
    (tmp_path / "model" / "config.json").rename(tmp_path / "disk" / "config.json")
    (tmp_path / "model" / "config.json").symlink_to("../disk/config.json")
    file = tmp_path / "models.yaml"
    text = "models:\n  m: {model_dir: model, engine: transformers}\n"
    file.write_text("supervisor: {model_roots: [disk]}\n" + text)
    named = load_config(file).models["m"].engine_spec
    assert named.model_roots == (str(tmp_path / "disk"),)
    file.write_text(text)
    fine, not_fine = ask_now([Question(named), Question(load_config(file).models["m"].engine_spec)])
    assert not fine.faults
    assert "supervisor.model_roots" in not_fine.faults[0].message
    file.write_text("supervisor: {model_roots: [/]}\n" + text)
    with pytest.raises(ConfigError, match="holds every file of the machine"):
        load_config(file)
