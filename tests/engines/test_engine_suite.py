"""Every engine passes these tests, which use its interface only."""

import random
from collections.abc import Callable

import pytest

from model_worker.engine import Engine, Finished, Job
from model_worker.engines import build_engine
from protocol.errors import ErrorCode, RequestError
from tests.chat import chat_ids, render
from tests.engines.conftest import demo_spec
from tests.engines.driver import GREEDY, Driver, answer
from tools.demo_models.corpus import (
    LETTERS_TEST_LONG_ANSWERS,
    LETTERS_TEST_LONG_PROMPTS,
    LETTERS_TEST_PROMPTS,
    STORIES_TEST_CONVERSATIONS,
    STORIES_TEST_REQUESTS,
    TEST_PROMPTS,
)

COUNT, COUNTED = LETTERS_TEST_LONG_ANSWERS[1]
"""A prompt and its answer of some hundred tokens."""
PROMPT, ANSWER = "count: 7 8 9 ->", " 10 11 12 13 14 15 16 17"


# its capabilities


def test_loads_with_progress_and_reports_capabilities(engine_name: str) -> None:
    engine = build_engine(demo_spec(engine_name, "letters", max_batch_size=2, max_seq_len=512))
    seen: list[tuple[str, int, int]] = []
    units: dict[str, str] = {}

    def progress(phase: str, done: int, total: int, unit: str = "", /) -> None:
        seen.append((phase, done, total))
        units[phase] = unit

    engine.load(progress)
    phases = [phase for phase, _, _ in seen]
    order = list(dict.fromkeys(phases))
    assert phases == sorted(phases, key=order.index), "one phase after the other"
    last = ["loading", "capturing", "warmup"] if engine_name == "exllamav2" else ["loading", "warmup"]
    assert order[-len(last) :] == last
    assert set(order[: -len(last)]) <= {"waiting for a compiler", "compiling ExLlamaV2", "compiling attention"}
    for phase in last:
        done = [d for p, d, _ in seen if p == phase]
        assert done == sorted(done)
        assert done[-1] == next(total for p, _, total in seen if p == phase), "ends at the total"
    assert units["loading"] == "bytes"
    capabilities = engine.capabilities
    assert capabilities.context == 512
    assert capabilities.max_batch_size == 2
    assert capabilities.offered >= {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"}
    assert capabilities.chat is False
    assert capabilities.device
    assert capabilities.attention
    Driver(engine).assert_idle()
    assert answer(engine, LETTERS_TEST_PROMPTS[0][0]).text == LETTERS_TEST_PROMPTS[0][1]


def test_step_is_empty_when_idle(letters: Engine) -> None:
    assert letters.step() == []
    Driver(letters).assert_idle()


def test_encode_and_decode_are_inverse(letters: Engine, stories: Engine) -> None:
    for engine in (letters, stories):
        for text in ("sort: d b a c ->", "Zoë and さくら 🐻‍❄️", " leading space", "", "a\nb\tc"):
            assert engine.decode(engine.encode(text)) == text


# greedy answers


def test_answers_the_demo_prompts(letters: Engine) -> None:
    driver = Driver(letters)
    expected = {driver.submit(prompt).job.id: text for prompt, text in LETTERS_TEST_PROMPTS[:24]}
    driver.run()
    for job_id, text in expected.items():
        assert driver.outcomes[job_id].text == text
        assert driver.outcomes[job_id].reason == "stop"
    driver.assert_idle()


def test_answers_chats(stories: Engine) -> None:
    driver = Driver(stories)
    pairs = STORIES_TEST_CONVERSATIONS[:4]
    expected = {
        driver.submit(chat_ids(stories, *(m["content"] for m in messages)), 300).job.id: text
        for messages, text in pairs
    }
    driver.run()
    for job_id, text in expected.items():
        assert driver.outcomes[job_id].text == text
        assert driver.outcomes[job_id].reason == "stop"


def test_answers_chats_with_tools(load: Callable[[str, str], Engine], engine_name: str) -> None:
    """The prompts have a history of calls and results. The markers of reasoning and calls are part of the answers."""
    agent = load(engine_name, "agent")
    agent.reset()
    driver = Driver(agent)
    expected = {driver.submit(prompt, 400).job.id: text for prompt, text in TEST_PROMPTS["agent"][:64:4]}
    driver.run()
    for job_id, text in expected.items():
        assert driver.outcomes[job_id].text == text
        assert driver.outcomes[job_id].reason == "stop"
    driver.assert_idle()


def test_long_prompts_are_computed_in_chunks_and_share_prefixes(letters: Engine) -> None:
    driver = Driver(letters)
    # the prompts are longer than chunk_size, and the last ones have a common beginning of more than a page
    pairs = [*LETTERS_TEST_LONG_PROMPTS[:3], *LETTERS_TEST_LONG_PROMPTS[-4:]]
    expected = {driver.submit(prompt, 40).job.id: text for prompt, text in pairs}
    assert max(len(o.job.prompt_ids) for o in driver.outcomes.values()) > 256
    driver.run()
    for job_id, text in expected.items():
        assert driver.outcomes[job_id].text == text


@pytest.mark.parametrize("seed", [1, 2])
def test_answers_do_not_depend_on_company(letters: Engine, seed: int) -> None:
    """Each of 16 jobs in random orders gets the answer that it gets alone, while 8 other jobs are cancelled."""
    rng = random.Random(seed)
    pairs = [*LETTERS_TEST_PROMPTS[24:36], *LETTERS_TEST_LONG_ANSWERS[:2], *LETTERS_TEST_LONG_PROMPTS[:2]]
    doomed = [LETTERS_TEST_LONG_ANSWERS[i % 3] for i in range(6)] + LETTERS_TEST_LONG_PROMPTS[4:6]
    jobs = [(*pair, True) for pair in pairs] + [(*pair, False) for pair in doomed]
    rng.shuffle(jobs)
    driver = Driver(letters)
    expected, to_cancel = {}, []
    for prompt, text, kept in jobs:
        outcome = driver.submit(prompt, 100)
        if kept:
            expected[outcome.job.id] = text
        else:
            to_cancel.append(outcome)
        for _ in range(rng.randrange(3)):
            driver.step()
        if to_cancel and rng.random() < 0.4:
            driver.cancel(to_cancel.pop(rng.randrange(len(to_cancel))))
    for outcome in to_cancel:
        for _ in range(rng.randrange(8)):
            driver.step()
        driver.cancel(outcome)
    driver.run()
    for job_id, text in expected.items():
        outcome = driver.outcomes[job_id]
        assert outcome.text == (text if outcome.reason == "stop" else text[: len(outcome.text)])
        assert outcome.reason == "stop" or len(outcome.ids) == 100
    driver.assert_idle()


# streams


def test_deltas_join_to_the_answer_and_ids_decode_to_it(letters: Engine, stories: Engine) -> None:
    for engine, prompt, text in (
        (letters, letters.encode(COUNT), COUNTED),
        (stories, chat_ids(stories, STORIES_TEST_REQUESTS[1][0]), STORIES_TEST_REQUESTS[1][1]),
    ):
        outcome = answer(engine, prompt, 400)
        assert outcome.text == text
        assert engine.decode(outcome.ids) == text
        assert len(outcome.deltas) > len(text) / 20, "it is a stream"


@pytest.mark.long
def test_characters_that_span_tokens_arrive_whole(stories: Engine) -> None:
    for request, text in STORIES_TEST_REQUESTS[:3]:
        outcome = answer(stories, chat_ids(stories, request), 400)
        assert outcome.text == text
        assert not any("\ufffd" in delta for delta in outcome.deltas)
        # the limit falls on every token around the first emoji: half an emoji becomes U+FFFD, a whole one stays
        first = next(i for i in range(len(outcome.ids)) if "\ufffd" in stories.decode(outcome.ids[: i + 1]))
        for size in range(first + 1, first + 6):
            cut = answer(stories, chat_ids(stories, request), size)
            assert cut.ids == outcome.ids[:size]
            whole = stories.decode(cut.ids)
            if "\ufffd" in whole:
                assert cut.text.rstrip("\ufffd") == whole.rstrip("\ufffd")
                assert cut.text.endswith("\ufffd")
            else:
                assert cut.text == whole


@pytest.mark.parametrize("size", [1, 2, 17])
def test_max_new_tokens_is_exact(letters: Engine, size: int) -> None:
    full = answer(letters, COUNT, 40)
    outcome = answer(letters, COUNT, size)
    assert outcome.reason == "length"
    assert outcome.ids == full.ids[:size]
    assert outcome.text == letters.decode(outcome.ids)


def test_the_whole_context_can_be_used(engine_name: str) -> None:
    engine = build_engine(demo_spec(engine_name, "letters", max_batch_size=1, max_seq_len=260, options={}))
    engine.load(lambda *_: None)
    prompt = engine.encode(LETTERS_TEST_LONG_PROMPTS[0][0])[:250]
    outcome = answer(engine, prompt, 260 - len(prompt))
    assert outcome.finished is not None
    with pytest.raises(RequestError, match="261 tokens"):
        answer(engine, prompt, 261 - len(prompt))


# stop strings


@pytest.mark.parametrize(
    ("stop", "text", "found"),
    [
        ((" 13",), " 10 11 12", " 13"),
        (("2 13 1",), " 10 11 1", "2 13 1"),  # spans tokens
        (("99", "11 12", "2 13"), " 10 ", "11 12"),
        ((" 10",), "", " 10"),
        (("17 18",), ANSWER, None),  # held until the end token, and then delivered
        (("7\n", "\n\n", "not there"), ANSWER, None),
    ],
)
def test_stop_strings_end_the_answer_and_are_no_part_of_it(
    letters: Engine, stop: tuple[str, ...], text: str, found: str | None
) -> None:
    outcome = answer(letters, PROMPT, stop=stop)
    assert outcome.text == text
    assert outcome.reason == "stop"
    assert outcome.finished is not None
    assert outcome.finished.stop_string == found
    assert all(text.startswith("".join(outcome.deltas[:i])) for i in range(len(outcome.deltas)))


def test_a_stop_string_that_the_last_token_completes_is_found(letters: Engine) -> None:
    stop = "11 12 13"
    ids = answer(letters, PROMPT).ids
    size = next(n for n in range(len(ids)) if stop in letters.decode(ids[:n]))
    outcome = answer(letters, PROMPT, size, stop=(stop,))
    assert (outcome.text, outcome.reason) == (" 10 ", "stop")
    before = answer(letters, PROMPT, size - 1, stop=(stop,))
    assert (before.text, before.reason) == (letters.decode(ids[: size - 1]), "length")  # the held text is delivered


def test_stop_strings_in_chats(stories: Engine) -> None:
    request, text = STORIES_TEST_REQUESTS[0]
    for stop in (". Mia", "🦊", "lantern near", "Once"):
        outcome = answer(stories, chat_ids(stories, request), 300, stop=(stop,))
        assert outcome.text == text[: text.index(stop)]


# cancelling


def test_cancel_pending(letters: Engine) -> None:
    driver = Driver(letters)
    running = [driver.submit(COUNT, 30) for _ in range(8)]
    waiting = driver.submit(COUNT, 30)
    driver.step()
    assert letters.stats().pending == 1
    driver.cancel(waiting)
    assert letters.stats().pending == 0
    driver.run()
    assert all(o.finished for o in running)
    driver.assert_idle()


def test_cancel_prefilling(letters: Engine) -> None:
    driver = Driver(letters)
    prompt, text = LETTERS_TEST_LONG_PROMPTS[-1]
    outcome = driver.submit(prompt, 30)
    driver.step()
    assert letters.stats().extra["prefilling"] == 1
    driver.cancel(outcome)
    driver.assert_idle()
    again = driver.submit(prompt, 30)  # half of the prompt was computed, which must leave nothing wrong behind
    driver.run()
    assert again.text == text


def test_cancel_decoding(letters: Engine) -> None:
    driver = Driver(letters)
    outcomes = [driver.submit(prompt, 300) for prompt, _ in LETTERS_TEST_LONG_ANSWERS[:8]]
    while not all(o.deltas for o in outcomes):
        driver.step()
    for outcome in outcomes[:-1]:
        driver.cancel(outcome)
    driver.run()
    assert outcomes[-1].text == LETTERS_TEST_LONG_ANSWERS[7][1][: len(outcomes[-1].text)]
    driver.assert_idle()


def test_cancel_before_the_first_step_twice_and_of_unknown_jobs(letters: Engine) -> None:
    driver = Driver(letters)
    outcome = driver.submit(COUNT)
    driver.cancel(outcome)
    driver.cancel(outcome)
    letters.cancel(10**9)
    driver.assert_idle()


def test_reset_forgets_everything(letters: Engine) -> None:
    driver = Driver(letters)
    for prompt, _ in LETTERS_TEST_LONG_PROMPTS[:12]:
        driver.submit(prompt, 30)
    driver.step()
    driver.step()
    letters.reset()
    Driver(letters).assert_idle()
    for prompt, text in LETTERS_TEST_PROMPTS[:2]:
        assert answer(letters, prompt).text == text


def test_more_jobs_than_places_wait_their_turn(letters: Engine) -> None:
    driver = Driver(letters)
    outcomes = [driver.submit(prompt) for prompt, _ in LETTERS_TEST_PROMPTS[:20]]
    assert letters.stats().pending == 20
    most = 0
    while driver.unfinished:
        driver.step()
        most = max(most, letters.stats().active)
    assert 0 < most <= 8
    assert [o.text for o in outcomes] == [text for _, text in LETTERS_TEST_PROMPTS[:20]]


def test_a_long_prompt_does_not_stall_running_answers(letters: Engine) -> None:
    driver = Driver(letters)
    running = driver.submit(COUNT, 200)
    while not running.ids:
        driver.step()
    driver.submit(LETTERS_TEST_LONG_PROMPTS[-1][0], 4)
    for _ in range(3):
        before = len(running.ids)
        driver.step()
        assert len(running.ids) > before


# refusals


@pytest.mark.parametrize(
    ("ids", "size", "field", "code"),
    [
        ((), 1, "prompt", ErrorCode.INVALID_REQUEST),
        ((5,) * 2049, 1, "prompt", ErrorCode.CONTEXT_OVERFLOW),
        ((5,) * 2048, 1, "prompt", ErrorCode.CONTEXT_OVERFLOW),
        ((5,) * 10, 2039, "max_tokens", ErrorCode.CONTEXT_OVERFLOW),
        ((5, 10**9), 1, "token_ids", ErrorCode.INVALID_REQUEST),
        ((5, -1), 1, "token_ids", ErrorCode.INVALID_REQUEST),
        ((5,), 0, "max_tokens", ErrorCode.INVALID_REQUEST),
    ],
)
def test_refuses_what_cannot_be_computed(
    letters: Engine, ids: tuple[int, ...], size: int, field: str, code: ErrorCode
) -> None:
    with pytest.raises(RequestError) as caught:
        letters.submit(Job(1, ids, size, GREEDY))
    assert caught.value.field == field
    assert caught.value.code == code
    Driver(letters).assert_idle()


def test_refuses_text_that_is_none(letters: Engine) -> None:
    with pytest.raises(RequestError, match="Unicode") as caught:
        letters.encode("lone surrogate \ud800")
    assert caught.value.field == "prompt"


def test_chat_templates(letters: Engine, stories: Engine) -> None:
    assert not letters.capabilities.chat
    assert letters.chat_template is None
    assert stories.capabilities.chat
    assert stories.chat_template is not None
    assert stories.chat_template.special_tokens["bos_token"] == "<s>"
    asked = [{"role": "user", "content": " hi "}]
    assert render(stories.chat_template, asked) == "<s><|user|>hi<|end|><|assistant|>"
    assert stories.encode_rendered("<s>").count(stories.encode_rendered("<s>")[0]) == 1, "no BOS is added"
    with pytest.raises(RequestError, match="refuses: unknown role tool") as caught:
        render(stories.chat_template, [{"role": "tool", "content": "the butler did it"}])
    assert caught.value.field == "messages"


def test_ids_without_a_text_are_refused(letters: Engine) -> None:
    with pytest.raises(RequestError, match="is not in the vocabulary of") as caught:
        letters.decode([5, 1 << 31])
    assert caught.value.field == "token_ids"


def test_one_token_prompts(letters: Engine) -> None:
    driver = Driver(letters)
    for _ in range(3):
        driver.submit([5], 5)
    driver.run()
    assert len({tuple(o.ids) for o in driver.outcomes.values()}) == 1


def test_finished_says_where_the_time_went(letters: Engine) -> None:
    finished = answer(letters, COUNT, 30).finished
    assert isinstance(finished, Finished)
    assert finished.prefill_s > 0
    assert finished.decode_s > 0
    assert finished.cached_tokens <= finished.prompt_tokens
