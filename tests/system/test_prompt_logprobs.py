"""Log-probabilities of a prompt reach the client once, and none is missing, also when the worker dies meanwhile."""

from collections.abc import Iterator, Sequence

import pytest

from modelctl import TokenLogprob
from protocol.errors import WireError
from tests.deterministic_engine import answer, prompt_logprob
from tests.serving import Serving, engine

PROMPT = "".join(chr(97 + number % 23) for number in range(30_000))


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    models = {"m": engine(context=40_000), "slow": engine(context=40_000, step_s=0.02, max_batch_size=2)}
    with Serving(models, poison={"limit": 100}, restart={"limit": 100, "initial": "10ms"}) as serving:
        yield serving


def check(tokens: Sequence[TokenLogprob], prompt: str, first: int, top: int) -> None:
    assert [token.text for token in tokens] == list(prompt[first:])
    for number, token in enumerate(tokens, first):
        assert token.logprob == pytest.approx(prompt_logprob(number))
        assert [other.token_id for other in token.top] == list(range(top))
        assert [other.logprob for other in token.top] == pytest.approx([prompt_logprob(number, n) for n in range(top)])


@pytest.mark.parametrize(("size", "first", "top"), [
    (1, 1, 2), (2, 1, 2), (256, 1, 0), (257, 1, 20), (258, 1, 1), (700, 300, 3), (700, 699, 0),
])  # fmt: skip
def test_both_clients_get_them(serving: Serving, size: int, first: int, top: int) -> None:
    prompt = PROMPT[:size]
    with serving.client() as client:
        options = {"max_tokens": 5, "prompt_logprobs": top, "prompt_logprobs_from": first}
        done = client.complete("m", prompt, **options)  # type: ignore[arg-type]
        assert done.text == answer(prompt, 5)
        check(done.prompt_logprobs, prompt, first, top)
        stream = client.generate("m", prompt, **options)  # type: ignore[arg-type]
        deltas = list(stream)
        check(stream.prompt_logprobs, prompt, first, top)
        pieces = [delta.prompt for delta in deltas if delta.prompt is not None]
        assert all(delta.prompt is not None for delta in deltas[: len(pieces)]), "they come before the answer"
        assert sum(map(len, pieces)) == size - first
        assert pieces[0].before[1] == prompt[first - 1].encode()
        assert not client.complete("m", prompt, max_tokens=5).prompt_logprobs


def test_an_empty_answer(serving: Serving) -> None:
    with serving.client() as client:
        for options in ({"prompt_logprobs": 1}, {}):
            done = client.complete("m", PROMPT[:600], max_tokens=0, **options)  # type: ignore[arg-type]
            assert (done.text, done.token_ids, done.finish_reason) == ("", (), "length")
            assert done.usage == {"prompt_tokens": 600, "completion_tokens": 0}
            check(done.prompt_logprobs, PROMPT[:600] if options else "", 1, 1)
        with pytest.raises(WireError, match="max_tokens is 0: must be at least 1 for messages"):
            client.complete("m", messages=[{"role": "user", "content": "x"}], max_tokens=0)
    serving.wait_idle("m")


def test_more_than_can_be_reported_is_refused_by_name(serving: Serving) -> None:
    with serving.client() as client:
        with pytest.raises(WireError, match="prompt_logprobs is 20: 59999 tokens") as refused:
            client.complete("m", token_ids=b"a\0\0\0" * 60_000, prompt_logprobs=20)
        assert refused.value.field == "prompt_logprobs"


@pytest.mark.parametrize("size", [5000, 30_000])
@pytest.mark.parametrize("max_tokens", [0, 40])
def test_a_worker_that_dies_while_it_reports_them(serving: Serving, size: int, max_tokens: int) -> None:
    prompt = PROMPT[:size]
    with serving.client() as client:
        stream = client.generate("slow", prompt, max_tokens=max_tokens, prompt_logprobs=2)
        delta = next(stream)
        assert delta.prompt is not None
        serving.worker("slow").kill()
        for _ in stream:
            pass
        assert stream.usage["resumes"] == 1
        check(stream.prompt_logprobs, prompt, 1, 2)
        assert stream.text == answer(prompt, max_tokens)
    serving.wait_idle("slow")


def test_a_worker_that_dies_behind_them(serving: Serving) -> None:
    prompt = PROMPT[:600]
    with serving.client() as client:
        stream = client.generate("slow", prompt, max_tokens=200, prompt_logprobs=1)
        while not stream.token_ids:
            next(stream)
        serving.worker("slow").kill()
        for _ in stream:
            pass
        assert stream.usage["resumes"] == 1
        check(stream.prompt_logprobs, prompt, 1, 1)
        assert stream.text == answer(prompt, 200)


def test_a_client_that_reads_slowly_gets_all(serving: Serving) -> None:
    with serving.client() as client:
        streams = [client.generate("m", PROMPT, max_tokens=2, prompt_logprobs=20) for _ in range(3)]
        for stream in streams:
            for _ in stream:
                pass
            check(stream.prompt_logprobs, PROMPT, 1, 20)


def test_a_cancelled_request_leaves(serving: Serving) -> None:
    with serving.client() as client:
        stream = client.generate("slow", PROMPT, max_tokens=5, prompt_logprobs=1)
        next(stream)
        stream.close()
        serving.wait_idle("slow")
