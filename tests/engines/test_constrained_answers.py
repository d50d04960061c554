"""Answers of engines have the shape that the constraint demands, whatever the logits are."""

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from model_worker.engine import Engine, Failed, Job
from model_worker.engines import build_engine
from protocol.errors import ErrorCode, RequestError
from protocol.messages import FinishReason
from protocol.request import SamplingParams
from tests.engines.conftest import ENGINES, demo_spec, need_gpu
from tests.engines.constraint_cases import HOSTILE, NOT_OFFERED, REGEXES, SCHEMAS
from tests.engines.driver import Driver, Outcome, answer
from tests.engines.exllamav2_cpu.harness import Harness

WARM = SamplingParams(temperature=1.0, seed=7)
PROMPT = "sort: d b a c ->"
PATIENCE = 200_000
"""Number of steps before a test fails. A step that waits for a constraint takes 5 ms."""


@pytest.fixture(scope="module", params=[*ENGINES, "exllamav2 on the CPU", "queued ahead", "draft", "ngram"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param in ("transformers", "transformers-cuda", "exllamav2"):
        need_gpu(request.param)
        made: Any = build_engine(demo_spec(request.param, "letters"))
        made.load(lambda *_: None)
    else:
        speculate = request.param if request.param in ("draft", "ngram") else None
        ahead = request.param == "queued ahead"
        made = Harness(pages=32, context=2048, batch=8, speculate=speculate, queues_ahead=ahead)
        made = made.engine
    yield made
    made.close()


def asked(engine: Engine, kind: str, what: Any, seed: int = 7, size: int = 900, **fields: Any) -> Outcome:
    sampling = fields.pop("sampling", SamplingParams(temperature=1.0, seed=seed))
    text = what if isinstance(what, str) else json.dumps(what)
    return answer(engine, PROMPT, size, sampling, constraint=(kind, text), **fields)


IN_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')


def between_parts(text: str) -> str:
    """Return JSON text without its strings."""
    return IN_STRINGS.sub("", text)


def whole(outcome: Outcome) -> str:
    """Return the text of an answer, and check that the answer was not cut short."""
    assert outcome.reason == FinishReason.STOP, (outcome.job.constraint, outcome.reason, outcome.text[-200:])
    return outcome.text


# Without a penalty, the model ``letters`` repeats itself for ever where a schema allows it. Even with a penalty, these
# schemas may lead it beyond max_tokens, by recursion or by keys of any length.
UNBOUNDED = {"map of integers", "list by recursion", "tree", "two that call each other", "recursion at the root"}


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEMAS)
def test_json_validates(engine: Engine, name: str) -> None:
    schema = SCHEMAS[name]
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    ended = 0
    for seed in range(2):
        sampling = SamplingParams(temperature=1.0, frequency_penalty=1.0, seed=seed)
        outcome = asked(engine, "json_schema", schema, sampling=sampling)
        if outcome.reason == FinishReason.LENGTH and name in UNBOUNDED:
            continue
        ended += 1
        text = whole(outcome)
        try:
            validator.validate(json.loads(text))
        except (ValueError, jsonschema.ValidationError) as e:
            raise AssertionError(f"seed {seed}: {text!r}") from e
        assert not re.search(r"\s", between_parts(text)), "compact"
    assert ended


@pytest.mark.long
@pytest.mark.parametrize("name", ["nested", "object", "array", "words of a person"])
def test_white_space_does_not_use_up_the_answer(name: str) -> None:
    """The model ``stories`` writes blanks wherever the constraint allows them."""
    stories = build_engine(demo_spec("transformers", "stories"))
    stories.load(lambda *_: None)

    def generated(schema: dict[str, Any], seed: int) -> Outcome:
        sampling = SamplingParams(temperature=1.0, seed=seed)
        return answer(stories, "Once upon a time", 300, sampling, constraint=("json_schema", json.dumps(schema)))

    try:
        for seed in range(6):
            text = whole(generated(SCHEMAS[name], seed))
            jsonschema.validate(json.loads(text), SCHEMAS[name])
            assert not re.search(r"\s", between_parts(text))
        flexible = SCHEMAS[name] | {"x-guidance": {"whitespace_flexible": True}}
        assert any(re.search(r"\s", between_parts(generated(flexible, seed).text)) for seed in range(6))
    finally:
        stories.close()


@pytest.mark.parametrize("regex", REGEXES)
def test_text_matches(engine: Engine, regex: str) -> None:
    for seed in range(2):
        assert re.fullmatch(regex, whole(asked(engine, "regex", regex, seed)), re.ASCII)


def test_one_of_several(engine: Engine) -> None:
    choices = ["perhaps", "yes", "yes, but", "no", "é🦊\n"]
    for seed in range(5):
        assert whole(asked(engine, "choice", choices, seed)) in choices
    assert whole(asked(engine, "choice", choices, sampling=SamplingParams(temperature=0))) in choices


def test_greedy_answers_are_the_same_each_time(engine: Engine) -> None:
    greedy = SamplingParams(temperature=0)
    texts = {asked(engine, "json_schema", SCHEMAS["nested"], sampling=greedy, size=80).text for _ in range(2)}
    assert len(texts) == 1


def test_together_with_others(engine: Engine) -> None:
    """Each answer of one batch has its own shape."""
    driver = Driver(engine)
    outcomes = [
        driver.submit(PROMPT, 60, WARM, constraint=("regex", regex)) for regex in ("a{40}", "[0-9]{30}", "(xy){12}")
    ]
    free = driver.submit(PROMPT, 20, SamplingParams(temperature=0))
    driver.run()
    assert outcomes[0].text == "a" * 40
    assert re.fullmatch("[0-9]{30}", outcomes[1].text)
    assert outcomes[2].text == "xy" * 12
    assert free.text == answer(engine, PROMPT, 20, SamplingParams(temperature=0)).text
    driver.assert_idle()


def test_parameters_meet_the_mask(engine: Engine) -> None:
    for sampling in (
        SamplingParams(temperature=1.3, top_k=3, top_p=0.5, min_p=0.2, seed=1),
        SamplingParams(temperature=1.0, repetition_penalty=1.2, frequency_penalty=0.5, seed=2),
        SamplingParams(temperature=0, presence_penalty=1.0),
        SamplingParams(temperature=0.02, typical_p=0.5, seed=3),
        SamplingParams(temperature=2.0, ignore_eos=True, seed=4),
    ):
        assert re.fullmatch("[0-9a-f]{24}", whole(asked(engine, "regex", "[0-9a-f]{24}", sampling=sampling)))


@pytest.mark.parametrize(
    "options",
    [
        {"mirostat_mode": 2},
        {"dry_multiplier": 2.0},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01},
        {"top_a": 0.5, "tfs": 0.5, "skew": 1.0, "smoothing_factor": 0.4},
        {"min_temp": 0.2, "max_temp": 3.0},
        {"cfg_scale": 1.6},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_only_exllamav2_has_meets_the_mask(engine: Engine, options: dict[str, Any]) -> None:
    if not options.keys() <= engine.capabilities.offered:
        return  # other tests check that the engine refuses the option
    negative = tuple(engine.encode("no")) if "cfg_scale" in options else None
    for seed in range(3):
        sampling = SamplingParams(temperature=1.0, seed=seed, **options)
        outcome = asked(engine, "regex", "[0-9a-f]{16}", sampling=sampling, negative_ids=negative, top_logprobs=2)
        assert re.fullmatch("[0-9a-f]{16}", whole(outcome))
        assert len(outcome.logprobs) == len(outcome.ids)


def test_max_tokens_cuts_it_short(engine: Engine) -> None:
    outcome = asked(engine, "regex", "[a-z]{200}", size=5)
    assert (outcome.reason, len(outcome.ids)) == (FinishReason.LENGTH, 5)
    assert re.fullmatch("[a-z]+", outcome.text)
    complete = asked(engine, "regex", "[a-z]", size=1)
    assert complete.reason == FinishReason.STOP, "complete with its last token"


def test_a_stop_string_cuts_it_short(engine: Engine) -> None:
    outcome = asked(engine, "regex", "[a-c]{9}stop[a-z]{9}", stop=("stop",))
    assert outcome.reason == FinishReason.STOP
    assert re.fullmatch("[a-c]{9}", outcome.text)


def test_min_tokens_and_ends(engine: Engine) -> None:
    """An answer does not end before min_tokens if more can follow. It ends where nothing can follow."""
    long = asked(engine, "regex", "a*", min_new_tokens=30, size=400, sampling=SamplingParams(temperature=0))
    assert len(long.ids) >= 30
    assert set(long.text) == {"a"}
    assert whole(asked(engine, "regex", "abc", min_new_tokens=30)) == "abc"
    assert whole(asked(engine, "choice", ["abc"], sampling=SamplingParams(ignore_eos=True, seed=1))) == "abc"


def test_tokens_allowed_and_banned(engine: Engine) -> None:
    a, b = (engine.encode("x" + letter)[-1] for letter in "ab")
    only = SamplingParams(temperature=1.0, seed=1, allowed_tokens=(a, b))
    assert re.fullmatch("[ab]{9}", whole(asked(engine, "regex", "[a-z]{9}", sampling=only)))
    biased = SamplingParams(temperature=1.0, seed=1, logit_bias={b: 100.0})
    assert whole(asked(engine, "regex", "[a-z]{9}", sampling=biased)) == "b" * 9


def test_nothing_left_to_draw(engine: Engine) -> None:
    """If no token is left at the first place, the request is refused. Later, the answer ends with the text it has."""
    a = engine.encode("xa")[-1]
    only = SamplingParams(temperature=1.0, seed=1, allowed_tokens=(a,))
    outcome = asked(engine, "regex", "aaab", sampling=only)
    assert (outcome.text, outcome.reason) == ("aaa", FinishReason.BANNED)
    outcome = asked(engine, "regex", "aaa(b|c)?", sampling=only)
    assert (outcome.text, outcome.reason) == ("aaa", FinishReason.STOP)
    assert refused(engine, ("regex", "ba"), sampling=only).field == "allowed_tokens"


def test_banned_strings_lead_it_another_way(engine: Engine) -> None:
    for seed in range(3):
        text = whole(asked(engine, "regex", "[a-f]{12}", seed, banned_strings=("aa", "bb", "ab", "cd")))
        assert re.fullmatch("[a-f]{12}", text)
        assert not re.search("aa|bb|ab|cd", text)
    schema = {"enum": ["one", "two", "three"]}
    assert whole(asked(engine, "json_schema", schema, banned_strings=("tw", "three"))) == '"one"'
    assert asked(engine, "choice", ["yes", "yo"], banned_strings=("y",)).reason == FinishReason.BANNED


def test_an_answer_goes_on(engine: Engine) -> None:
    """A resumed answer first replays the tokens of the former worker, and then continues as if never interrupted."""
    first = asked(engine, "json_schema", SCHEMAS["nested"])
    text = whole(first)
    for cut in (1, len(first.ids) // 2, len(first.ids) - 1):
        rest = asked_on(engine, first.ids[:cut])
        assert [*first.ids[:cut], *rest.ids] == first.ids
        assert text.endswith(rest.text)
        assert rest.reason == FinishReason.STOP


def asked_on(engine: Engine, delivered: list[int]) -> Outcome:
    """Submit a resumed job without the driver, which counts the tokens of one worker."""
    text = json.dumps(SCHEMAS["nested"])
    job = Job(
        10**7, tuple(engine.encode(PROMPT)), 900, SamplingParams(temperature=1.0, seed=7),
        constraint=("json_schema", text), resumed_ids=tuple(delivered),
    )  # fmt: skip
    engine.submit(job)
    outcome = Outcome(job)
    for _ in range(PATIENCE):
        for event in engine.step():
            assert not isinstance(event, Failed), event
            outcome.text += getattr(event, "text", "")
            outcome.ids += getattr(event, "token_ids", ())
            if hasattr(event, "finish_reason"):
                outcome.finished = event
                return outcome
    raise AssertionError("no end")


def refused(engine: Engine, constraint: tuple[str, str], **fields: Any) -> RequestError:
    """Return the error of a job that is refused, or that fails after it was accepted."""
    sampling = fields.pop("sampling", WARM)
    job = Job(10**8, tuple(engine.encode(PROMPT)), 30, sampling, constraint=constraint, **fields)
    try:
        engine.submit(job)
    except RequestError as e:
        return e
    for _ in range(PATIENCE):
        for event in engine.step():
            assert isinstance(event, Failed), event
            assert event.job == job.id
            assert engine.step() == []
            return event.error
    raise AssertionError("neither taken nor refused")


@pytest.mark.parametrize(("named", "schema"), NOT_OFFERED[:4])
def test_what_is_not_offered_is_refused_by_name(engine: Engine, named: str, schema: dict[str, Any]) -> None:
    error = refused(engine, ("json_schema", json.dumps(schema)))
    assert named in error.message
    assert (error.field, error.code) == ("json_schema", ErrorCode.UNSUPPORTED)
    assert refused(engine, ("regex", "(")).message == "regex: unclosed group"
    assert refused(engine, ("regex", "a"), token_healing=True).field == "token_healing"


@pytest.mark.long
def test_others_go_on_beside_a_hostile_one(engine: Engine) -> None:
    driver = Driver(engine)
    free = driver.submit(PROMPT, 30, SamplingParams(temperature=0, ignore_eos=True))
    kind, what = HOSTILE[0]
    job = Job(10**9, tuple(engine.encode(PROMPT)), 30, WARM, constraint=(kind, json.dumps(what)))
    engine.submit(job)
    assert engine.stats().pending >= 1
    failed: list[Failed] = []
    for _ in range(PATIENCE):
        for event in engine.step():
            if event.job == job.id:
                assert isinstance(event, Failed)
                failed.append(event)
                assert free.ids, "others have gone on"
            else:
                free.ids += getattr(event, "token_ids", ())
        if failed:
            break
    assert len(failed) == 1
    assert len(free.ids) == 30
    assert "more than a second" in failed[0].error.message


def test_cancelling_one_that_is_compiled(engine: Engine) -> None:
    driver = Driver(engine)
    outcome = driver.submit(PROMPT, 30, WARM, constraint=("regex", "z{5,9}cancelled"))
    with pytest.raises(ValueError, match="in use"):
        engine.submit(outcome.job)
    driver.cancel(outcome)
    for _ in range(20):
        driver.step()
    driver.assert_idle()
    engine.submit(Job(10**9 + 1, tuple(engine.encode(PROMPT)), 5, WARM, constraint=("regex", "y+")))
    engine.reset()
    driver.assert_idle()
