"""``modelctl run`` gives one answer, reads prompts from pipes, and obeys Ctrl-C. test_conversation tests the rest."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cli.programs import MODELCTL, Terminal
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.serving import Serving, engine, wait_until

ENDLESS = "100000"


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with Serving({"a": engine(context=200_000), "stopped": engine(autostart=False)}) as serving:
        yield serving
        serving.wait_idle("a")


def chat(*turns: str) -> str:
    """Return the prompt that the engine gets for a conversation. The first message is the user's."""
    return "\n".join(f"{('user', 'assistant')[i % 2]}: {text}" for i, text in enumerate(turns))


def test_one_answer(serving: Serving) -> None:
    done = serving.modelctl("run", "a", "hello", "--max-tokens", "12")
    assert (done.returncode, done.stdout) == (0, answer(chat("hello"), 12) + "\n")


def test_the_prompt_as_it_is(serving: Serving) -> None:
    assert serving.modelctl("run", "a", "--raw", "hello", "--max-tokens", "9").stdout == answer("hello", 9) + "\n"


def test_the_prompt_from_a_pipe(serving: Serving) -> None:
    done = serving.modelctl("run", "a", "-", "--raw", "--max-tokens", "9", input="from\na pipe")
    assert done.stdout == answer("from\na pipe", 9) + "\n"


def test_as_json(serving: Serving) -> None:
    done = serving.modelctl("run", "a", "hello", "--max-tokens", "7", "--json")
    *deltas, end = map(json.loads, done.stdout.splitlines())
    assert done.stderr == ""
    assert deltas
    assert {line["type"] for line in deltas} == {"delta"}
    assert (end["type"], end["model"], end["finish_reason"]) == ("end", "a", "length")
    assert "".join(line["text"] for line in deltas) == end["text"] == answer(chat("hello"), 7)
    assert sum(len(line["token_ids"]) for line in deltas) == end["usage"]["completion_tokens"] == 7


def test_log_probabilities_as_json(serving: Serving) -> None:
    done = serving.modelctl("run", "a", "hello", "--max-tokens", "3", "--json", "--logprobs", "--set", "top_logprobs=1")
    *deltas, end = map(json.loads, done.stdout.splitlines())
    logprobs = [each for line in deltas for each in line["logprobs"]]
    assert "".join(each["text"] for each in logprobs) == end["text"] == answer(chat("hello"), 3)
    for each in logprobs:
        assert each["logprob"] == 0.0
        assert [other["token_id"] for other in each["top"]] == [each["token_id"]]


def test_json_lines_come_while_the_answer_is_computed(serving: Serving) -> None:
    command = ("run", "a", "endless", "--json", "--max-tokens", "4000", "--runtime-dir", str(serving.runtime_dir))
    with subprocess.Popen(
        [*MODELCTL, *command], env=serving.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        assert json.loads(running.stdout.readline())["type"] == "delta"
        assert running.poll() is None
        running.send_signal(signal.SIGINT)
        lines = [json.loads(line) for line in running.stdout]
        assert running.stderr.read() == ""
    assert (lines[-1]["type"], lines[-1]["finish_reason"]) == ("end", "cancelled")
    assert running.returncode == 130


def test_any_field_can_be_set(serving: Serving) -> None:
    options = ("--set", "temperature=0", "--set", "dry_multiplier=0.8", "--set", 'dry_sequence_breakers=["x"]')
    more = ("--min-tokens", "2", "--min-p", "0.1", "--repetition-penalty", "1.1", "--set", "max_tokens=9")
    assert serving.modelctl("run", "a", "--raw", "hello", *options, *more).stdout == answer("hello", 9) + "\n"


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--set", "temprature=0"), 1, "unknown field 'temprature': did you mean 'temperature'?"),
        (("--set", "top_p=2"), 1, "top_p is 2: must be at most 1"),
        (("--set", "temperature=hot"), 1, "temperature is a string of 3 characters"),
        (("--set", "banned_tokens=[5]"), 1, "banned_tokens is not offered by this model's engine"),
        (("--set", "temperature=0", "--temperature", "1"), 2, "--temperature is given as well"),
        (("--set", "temperature=0", "--set", "temperature=1"), 2, "'temperature' is given twice"),
        (("--set", "prompt=x"), 2, "'prompt' is set by the command itself"),
        (("--set", "temperature"), 2, "is not NAME=VALUE"),
        (("--logprobs",), 2, "--logprobs needs --json"),
    ],
)
def test_fields_that_are_wrong_are_named(serving: Serving, options: tuple[str, ...], code: int, message: str) -> None:
    done = serving.modelctl("run", "a", "hello", *options)
    assert message in done.stderr
    assert (done.returncode, done.stdout) == (code, "")


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_what_is_piped_in_is_one_prompt(serving: Serving, arguments: tuple[str, ...]) -> None:
    done = serving.modelctl("run", "a", *arguments, "--max-tokens", "8", input="one\n\ntwo\n")
    assert (done.returncode, done.stdout) == (0, answer(chat("one\n\ntwo"), 8) + "\n")
    assert done.stderr == ""


def test_a_pipe_beside_a_prompt_comes_before_it(serving: Serving) -> None:
    done = serving.modelctl("run", "a", "what is it?", "--max-tokens", "8", input="a file\nof two lines\n")
    assert (done.returncode, done.stdout) == (0, answer(chat("a file\nof two lines\n\nwhat is it?"), 8) + "\n")
    done = serving.modelctl("run", "a", "what is it?", "--max-tokens", "8", input="")
    assert done.stdout == answer(chat("what is it?"), 8) + "\n"


def test_a_pipe_that_does_not_end_is_named(serving: Serving) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "supervisor", "run", "a", "hello", "--max-tokens", "8"],
        env={**serving.environment, "MODELCTL_RUNTIME_DIR": str(serving.runtime_dir)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert "waiting for standard input" in process.stderr.readline()
        assert process.communicate()[0] == answer(chat("hello"), 8) + "\n"


@pytest.mark.parametrize(
    ("arguments", "given", "code", "message"),
    [
        (("a", "--max-tokens", "200001"), "hi\n", 1, "context_overflow"),
        (("nosuch",), "hi\n", 1, "no model 'nosuch' is configured"),
        (("nosuch", "hi"), "", 1, "no model 'nosuch' is configured: there is a, stopped"),
        (("stopped",), "hi\n", 1, "start it with `modelctl start stopped`"),
        (("stopped", "--system", "be kind"), "hi\n", 1, "start it with `modelctl start stopped`"),
        (("a",), "", 2, "standard input is empty"),
        (("a", "--json"), " \n", 2, "standard input is empty"),
    ],
)
def test_a_pipe_that_comes_to_nothing_ends_with_an_error(
    serving: Serving, arguments: tuple[str, ...], given: str, code: int, message: str
) -> None:
    done = serving.modelctl("run", *arguments, input=given)
    assert (done.returncode, done.stdout) == (code, "")
    assert message in done.stderr


@pytest.mark.parametrize("given", ["", "hi\n"])
@pytest.mark.parametrize(
    ("argument", "wrong", "way"),
    [
        ("hello", "no model 'hello' is configured: there is a, stopped", "`modelctl run MODEL hello`"),
        ("Tell me a story.", "a text of 16 characters is no model's name: there is a", "`modelctl run MODEL PROMPT`"),
        ("stoped", "no model 'stoped' is configured; did you mean 'stopped'?", ""),
    ],
)
def test_a_prompt_without_a_model_is_told_from_a_model(
    serving: Serving, argument: str, wrong: str, way: str, given: str
) -> None:
    done = serving.modelctl("run", argument, input=given)
    assert (done.returncode, done.stdout) == (1, "")
    assert wrong in done.stderr
    assert way in done.stderr
    assert ("the first argument is the model, and a prompt comes after it" in done.stderr) == bool(way)


def test_the_only_model_is_named_for_a_prompt_without_a_model(serve: Serve) -> None:
    done = serve({"only": engine()}).modelctl("run", "hello", input="")
    assert done.returncode == 1
    assert "no model 'hello' is configured: there is only; the first argument is the model" in done.stderr
    assert "`modelctl run only hello`" in done.stderr


def test_a_pipe_that_is_no_text(serving: Serving) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "supervisor", "run", "a"],
        env={**serving.environment, "MODELCTL_RUNTIME_DIR": str(serving.runtime_dir)},
        input=b"ab\xffcd",
        capture_output=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"standard input is not UTF-8 text: byte 0xff at offset 2" in done.stderr


def test_ctrl_c_ends_a_single_answer(serving: Serving) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "supervisor", "run", "a", "--raw", "endless", "--max-tokens", ENDLESS],
        env={**serving.environment, "MODELCTL_RUNTIME_DIR": str(serving.runtime_dir)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        begin = process.stdout.read(20)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()  # communicate() would miss text that the first read has buffered
        assert process.stderr is not None
        errors = process.stderr.read()
        process.wait(60)
    text = (begin + rest).removesuffix("\n")
    assert text == answer("endless", len(text))
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_ctrl_c_ends_the_answer_and_not_the_conversation(serving: Serving) -> None:
    command = ("run", "a", "--max-tokens", "1500", "--runtime-dir", serving.runtime_dir)
    with Terminal(*command, environment=serving.environment) as terminal:
        terminal.wait_for(">>> ")
        terminal.type("one\n")
        terminal.wait_for("one\n")
        wait_until(lambda: len(terminal.look()) > 20)
        terminal.type("\x03")
        said = terminal.wait_for_match(r"^([a-z ]*)(?:\^C)?([a-z ]*)\n\(cancelled\)\n>>> ")
        partial = said[1] + said[2]
        assert 20 < len(partial) < 1500
        assert partial == answer(chat("one"), len(partial))
        serving.wait_idle("a")

        terminal.type("half a line")
        terminal.wait_for("half a line")
        terminal.type("\x03")  # Ctrl-C at the prompt only drops the line
        terminal.wait_for(">>> ")
        terminal.type("two\n")
        terminal.wait_for("two\n")
        second = terminal.wait_for_match(r"^([a-z ]{1500})\n>>> ")
        assert second[1] == answer(chat("one", partial, "two"), 1500)
        terminal.type("\x04")
        assert terminal.wait_for_exit() == 0
