"""Constrained answers work through the whole product: client, supervisor, worker, and the worker's helper process."""

import json
import re
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import jsonschema
import pytest

from modelctl import Client
from protocol.errors import ErrorCode, WireError
from tests.engines.constraint_cases import HOSTILE, SCHEMAS
from tests.serving import Serving, is_alive, is_helper, wait_until

PROMPT = "sort: d b a c ->"


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    model = {"model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu", "max_batch_size": 8}
    with Serving({"letters": model}, wait=False) as running:
        running.wait_state("letters", "ready")
        yield running


@pytest.fixture
def client(serving: Serving) -> Iterator[Client]:
    with serving.client() as one:
        yield one


@pytest.mark.long
def test_every_kind(client: Client) -> None:
    schema = SCHEMAS["nested"]
    for given in (schema, json.dumps(schema)):
        reported = client.complete("letters", PROMPT, json_schema=given, seed=1, max_tokens=400)
        jsonschema.validate(json.loads(reported.text), schema)
        assert reported.finish_reason == "stop"
        assert not re.search(r"\s", reported.text), "no white space but in strings, of which it has none"
    flexible = [
        client.complete("letters", PROMPT, json_schema=schema, whitespace_flexible=True, seed=seed, max_tokens=400).text
        for seed in range(3)
    ]
    assert any(re.search(r"\s", text) for text in flexible)
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", client.complete("letters", PROMPT, regex=r"[a-f]{3}-\d{2}", seed=1).text)
    assert client.complete("letters", PROMPT, choice=["yes", "no"], seed=1).text in ("yes", "no")


def test_refused_by_name(client: Client) -> None:
    with pytest.raises(WireError, match="uniqueItems is not offered") as refused:
        client.complete("letters", PROMPT, json_schema={"type": "array", "uniqueItems": True})
    assert (refused.value.code, refused.value.field) == (ErrorCode.UNSUPPORTED, "json_schema")
    with pytest.raises(WireError, match="cannot be given together") as refused:
        client.complete("letters", PROMPT, regex="a", choice=["a"])
    assert refused.value.field == "choice"


def refusal_of(client: Client, kind: str, what: object) -> str | None:
    """Return the name of the refused field, or None if an answer came."""
    try:
        client.complete("letters", PROMPT, max_tokens=3, **{kind: what})
    except WireError as e:
        return e.field
    return None


@pytest.mark.long
def test_a_stream_goes_on_beside_hostile_schemas(serving: Serving, client: Client) -> None:
    times: list[float] = []
    began, reported = threading.Event(), threading.Event()

    def stream() -> None:
        with serving.client() as other:
            for _ in other.generate("letters", PROMPT, temperature=0, ignore_eos=True, max_tokens=1500):
                times.append(time.monotonic())
                began.set()
                if reported.is_set():
                    return

    reading = threading.Thread(target=stream)
    reading.start()
    assert began.wait(30)
    try:
        fields = [refusal_of(client, kind, what) for kind, what in HOSTILE]
    finally:
        reported.set()
        reading.join(60)
    assert set(fields) <= {"json_schema", "regex", None}
    gaps = sorted(later - earlier for earlier, later in pairwise(times))
    print(f"gaps: median {gaps[len(gaps) // 2] * 1000:.1f} ms, longest {gaps[-1] * 1000:.1f} ms")
    assert sum(gap >= 0.9 for gap in gaps) <= 1, "as long as a compile may take, more often than a machine hiccups"
    serving.wait_idle("letters")


@pytest.mark.long
def test_the_child_ends_with_its_worker(serving: Serving, client: Client) -> None:
    client.complete("letters", PROMPT, choice=["once"])
    worker = serving.worker("letters")
    children = [child for child in worker.children() if is_helper(child, "constraint child", "constraint_child")]
    assert [" ".join(child.cmdline()).strip() for child in children] == ["modelctl: constraint child"]
    worker.kill()
    wait_until(lambda: not is_alive(children[0]), what="the end of the child")
    serving.wait_state("letters", "ready")
    assert client.complete("letters", PROMPT, choice=["again"]).text == "again"
