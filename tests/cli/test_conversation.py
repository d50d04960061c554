"""``modelctl run`` in a terminal holds a conversation, obeys its commands, and drops old turns at the context limit."""

from collections.abc import Iterator

import pytest

from tests.cli.programs import Terminal
from tests.deterministic_engine import answer
from tests.serving import Serving, engine

CONTEXT = 170
LENGTH = 20
"""Number of tokens of each answer."""


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    models = {
        "a": engine(),
        "small": engine(context=CONTEXT),
        "limited": {**engine(), "limits": {"prompt_tokens": 140}},
    }
    with Serving(models) as serving:
        yield serving


class Talk:
    """A user at a terminal who can compute each answer, since the answer depends on the shown messages alone."""

    def __init__(self, serving: Serving, model: str, *options: str, length: int = LENGTH) -> None:
        self.length = length
        self.shown: list[str] = []
        """The messages that are sent before the next question, as the engine sees them."""
        command = ("run", model, "--max-tokens", length, *options, "--runtime-dir", serving.runtime_dir)
        self.terminal = Terminal(*command, environment=serving.environment)
        self.terminal.wait_for(">>> ")

    def ask(self, text: str, typed: str | None = None) -> None:
        """Ask, and wait for the answer that follows from ``shown`` and ``text``. ``typed``: keys typed instead."""
        self.shown.append(f"user: {text}")
        self.terminal.type((typed or text) + "\n")
        said = answer("\n".join(self.shown), self.length)
        self.shown.append(f"assistant: {said}")
        self.terminal.wait_for(f"\n{said}\n")

    def type(self, line: str, answered: str) -> None:
        self.terminal.wait_for(">>> ")
        self.terminal.type(line + "\n")
        self.terminal.wait_for(answered)

    def end(self, line: str = "/bye") -> None:
        self.terminal.wait_for(">>> ")
        self.terminal.type(line + "\n")
        assert self.terminal.wait_for_exit() == 0

    def __enter__(self) -> "Talk":
        return self

    def __exit__(self, *_: object) -> None:
        self.terminal.__exit__()


def test_commands(serving: Serving) -> None:
    with Talk(serving, "a", "--system", "be kind") as talk:
        talk.shown = ["system: be kind"]
        talk.ask("one")
        talk.ask("two")
        talk.type("/undo", "(the last turn is forgotten; 1 left)")
        talk.shown = talk.shown[:3]
        talk.ask("three")
        talk.type("/clear", "(the conversation begins anew)")
        talk.shown = talk.shown[:1]
        talk.type("/undo", "(there is no turn to forget)")
        talk.ask("four")
        talk.type("/help", "/clear    forget the conversation")
        talk.type("/etc/passwd, what is it?", "no command '/etc/passwd,'")
        talk.ask("/etc/passwd, what is it?", typed='"""/etc/passwd, what is it?"""')
        talk.end()


def test_a_text_of_several_lines(serving: Serving) -> None:
    with Talk(serving, "a") as talk:
        talk.ask("first\n\n  second\nthird", typed='"""\nfirst\n\n  second\nthird"""')
        talk.ask("one\ntwo", typed='"""one\ntwo\n"""')
        talk.terminal.wait_for(">>> ")
        talk.terminal.type('"""dropped\n')
        talk.terminal.wait_for("... ")
        talk.terminal.type("\x03")
        talk.terminal.wait_for(">>> ")
        talk.ask("next")
        talk.terminal.wait_for(">>> ")
        talk.terminal.type('"""never closed\n')
        talk.terminal.wait_for("... ")
        talk.terminal.type("\x04")
        talk.terminal.wait_for('not sent: the text was not closed with """')
        assert talk.terminal.wait_for_exit() == 0


@pytest.mark.parametrize("model", ["small", "limited"])
def test_the_oldest_turns_go_when_the_context_is_reached(serving: Serving, model: str) -> None:
    """Three turns fit into the prompt limit and a fourth does not. On ``limited``, models.yaml sets that limit."""
    with Talk(serving, model, "--system", "s") as talk:
        talk.shown = ["system: s"]
        for number in range(3):
            talk.ask(f"question {number}")
        del talk.shown[1:3]
        talk.ask("question 3")
        talk.terminal.wait_for("from now on its oldest turns are left out)\n>>> ")
        for number in range(4, 7):
            del talk.shown[1:3]
            talk.ask(f"question {number}")
            talk.terminal.wait_for(">>> ")
            assert "left out" not in talk.terminal.look(), "it is said once"
        talk.terminal.type("/bye\n")
        assert talk.terminal.wait_for_exit() == 0


def test_an_answer_that_fills_the_context_says_so(serving: Serving) -> None:
    run = ("run", "small", "--runtime-dir", serving.runtime_dir)
    with Terminal(*run, environment=serving.environment) as terminal:
        for question in ("first", "second"):  # the first turn leaves no room, so it is not sent with the second
            terminal.wait_for(">>> ")
            terminal.type(f"{question}\n")
            terminal.wait_for(f"\n{answer(f'user: {question}', CONTEXT - len(f'user: {question}'))}\n")
            terminal.wait_for(f"(the answer ends here: the context of {CONTEXT} tokens is full)")
        terminal.wait_for(">>> ")
        terminal.type("\x04")
        assert terminal.wait_for_exit() == 0


def test_a_question_too_long_for_any_conversation_is_refused_and_the_rest_is_kept(serving: Serving) -> None:
    with Talk(serving, "small") as talk:
        talk.ask("one")
        talk.type("x" * 200, "context_overflow")
        talk.ask("two")
        talk.end()
