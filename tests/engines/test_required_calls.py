"""Random answers under the worker's constraint of calls: every call parses, and its arguments validate.

``benchmarks.required_calls`` draws 10,000 of them.
"""

import random
import time
from collections.abc import Iterator

import pytest

from model_worker.engine import Job
from model_worker.intake import ModelTraits, calls_text
from protocol.answer_formats.families import FAMILIES
from protocol.chat import ChatMessage
from protocol.errors import RequestError
from protocol.request import GenerateRequest, SamplingParams
from tests.answer_formats.answers import bare
from tests.engines.random_calls import Walker, calls_of, request_of, write_vocabulary

ANSWERS = 3


@pytest.fixture(scope="module")
def walker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walker]:
    made = Walker(write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "model"))
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("format", FAMILIES)
def test_required_calls_parse_and_validate(walker: Walker, format: str, seed: int) -> None:
    rng = random.Random(f"{format}{seed}")
    request = request_of(rng)
    constraint = walker.constraint(format, request)
    for _ in range(ANSWERS):
        constraint.back_to(0)
        pieces, ended = walker.answer(constraint, format, rng)
        assert ended
        assert calls_of(request, format, pieces), "".join(pieces)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("format", FAMILIES)
def test_calls_that_the_model_begins_itself(walker: Walker, format: str, seed: int) -> None:
    """With ``auto`` the constraint waits. It begins with the first call, whose arguments validate."""
    rng = random.Random(f"{format}{seed}")
    request = request_of(rng, "auto")
    begins = [f"I see.\n{FAMILIES[format].begins[0]}"]
    if (write := bare(format)) is not None:
        assert request.tools is not None
        begins.append("\n" + write([(request.tools[0]["function"]["name"], {})]).removesuffix("}}"))
    for begin in begins:
        constraint = walker.constraint(format, request)
        assert constraint.free
        pieces, ended = walker.answer(constraint, format, rng, begin)
        assert not constraint.free
        assert ended
        assert calls_of(request, format, pieces), "".join(pieces)


@pytest.mark.parametrize("format", [format for format in FAMILIES if bare(format) is not None])
def test_json_without_a_call_is_text(walker: Walker, format: str) -> None:
    """An answer that begins like a call wakes the constraint, which allows every text that names no tool."""
    request = request_of(random.Random(1), "auto")
    for text in ('{"name": "nobody", "age": 1}', '\n {"a": [1]} and so on', "{"):
        constraint = walker.constraint(format, request)
        for token in walker.tokenizer.encode_rendered(text):
            assert constraint.allowed[token]
            constraint.push(token)
        assert constraint.accepting
        assert not constraint.free


def test_no_marker_of_another_format_hides_in_a_call(walker: Walker) -> None:
    """A special token that is not part of the text would be missing in the arguments."""
    format = "glm45"
    request = request_of(random.Random(3))
    constraint = walker.constraint(format, request)
    hidden = walker.tokenizer.special_ids({"[TOOL_CALLS]", "<|python_tag|>"})
    shown = walker.tokenizer.special_ids({"<tool_call>"})
    assert len(hidden) == 2
    assert not constraint.allowed[list(hidden)].any()
    assert constraint.allowed[list(shown)].all()


@pytest.mark.parametrize("format", ["hermes"])
def test_a_schema_that_takes_long_to_compile_is_refused(walker: Walker, format: str) -> None:
    request = request_of(random.Random(4)).but(
        **{
            "tools": (
                {
                    "function": {
                        "name": "slow",
                        "parameters": {"properties": {"n": {"type": "integer", "multipleOf": 1_000_003}}},
                    }
                },
            )
        }
    )
    begun = time.process_time()
    with pytest.raises(RequestError, match=r"tools: .*compiling it takes more than a second"):
        walker.constraint(format, request)
    assert time.process_time() - begun < 1, "the worker itself has not compiled it"


def test_a_shape_comes_behind_the_reasoning_and_the_header_of_harmony(walker: Walker) -> None:
    """The marker that begins the reasoning begins like the header of a text. A prompt ends in front of both."""
    format = ModelTraits("harmony", ("<|channel|>analysis<|message|>", "<|end|>"))
    request = GenerateRequest(
        messages=(ChatMessage(role="user", content="x"),), json_schema='{"enum":["yes"]}', with_format=True
    )
    place = format.place("<|start|>user<|message|>x<|end|><|start|>assistant", None)
    assert place == "before"
    layout = format.layout(request, place)
    assert {"<|channel|>", "<|message|>", "<|start|>", "<|end|>"} <= layout.visible, "also without tools"
    made = ("tools", calls_text(request, "harmony"))
    header, thought = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>so <x>"
    for text in (f"{thought}<|end|><|start|>assistant{header}", header):
        constraint = walker.made(Job(1, (1,), 99, SamplingParams(), constraint=made, layout=layout))
        for token in walker.tokenizer.encode_rendered(f'{text}"yes"'):
            assert constraint.allowed[token]
            constraint.push(token)
        assert constraint.finished
    constraint = walker.made(Job(1, (1,), 99, SamplingParams(), constraint=made, layout=layout))
    assert not constraint.allowed[walker.tokenizer.encode_rendered('"')].any()
