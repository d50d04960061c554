"""The ledger of usage equals what clients have counted, whatever dies, and its disk costs no request."""

import hashlib
import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psutil
import pytest

from modelctl import Client
from protocol.client.answers import Delta
from protocol.errors import ConnectionLost, ErrorCode, WireError
from tests.gateway.asking import ask
from tests.keyed import Keyed, free_port
from tests.serving import WITHIN, Serving, engine, is_helper, wait_until

WINDOW = 256
"""Events that a stream may be ahead of its client, and so the most that can be on the way when a process dies."""
NOTHING = {"requests": 0, "prompt_tokens": 0, "cached_tokens": 0, "completion_tokens": 0}


def writer(serving: Serving) -> psutil.Process | None:
    for process in psutil.Process(serving.pid).children():
        if is_helper(process, "usage writer", "supervisor.usage.writer"):
            return process
    return None


def total(client: Client, **wanted: str) -> dict[str, int]:
    found: dict[str, int] = client.usage(**wanted)["total"]
    return found


def rest(deltas: Iterator[Delta]) -> int:
    """Return the tokens that still come before the connection is lost."""
    tokens = 0
    with pytest.raises(ConnectionLost):  # noqa: PT012
        for delta in deltas:
            tokens += len(delta.token_ids)
    return tokens


@pytest.fixture
def serving() -> Iterator[Serving]:
    # A test kills workers whatever they do, so a request may die with several. None of them is to be blamed for that.
    models = {"letters": engine(replicas=2), "stories": engine()}
    with Serving(models, restart={"limit": 1000}, poison={"limit": 1000}) as serving:
        yield serving


def test_tokens_are_counted_by_model_and_kept_across_restarts(serving: Serving) -> None:
    with serving.client() as client:
        assert total(client) == NOTHING
        for _ in range(3):
            client.complete("letters", "hello", max_tokens=7)
        client.complete("stories", "hi", max_tokens=2)
        with pytest.raises(WireError):
            client.complete("letters", "x" * 9999)
        rows = client.usage()["rows"]
    letters = {"requests": 4, "prompt_tokens": 15, "cached_tokens": 0, "completion_tokens": 21}
    stories = {"requests": 1, "prompt_tokens": 2, "cached_tokens": 0, "completion_tokens": 2}
    assert [{k: v for k, v in row.items() if k != "day"} for row in rows] == [
        {"key": None, "model": "letters", **letters}, {"key": None, "model": "stories", **stories},
    ]  # fmt: skip
    for number in range(2):
        serving.order("shutdown") if number else serving.kill()
        if number:
            serving.process.wait(WITHIN)
        serving.start_again({"stories": engine()})
        with serving.client() as client:
            assert client.usage()["rows"] == rows
            assert total(client, model="stories") == stories
            assert total(client, since="2999-01-01") == NOTHING
    shown = serving.modelctl("usage")
    header = " ".join(shown.stdout.splitlines()[0].split())
    assert header == "DAY KEY MODEL REQUESTS IN CACHED OUT"
    assert shown.stdout.splitlines()[-1].split() == ["total", "5", "17", "0", "23"]
    as_json = json.loads(serving.modelctl("usage", "--model", "letters", "--since", "1d", "--json").stdout)
    assert as_json["total"] == letters
    matching = json.loads(serving.modelctl("usage", "--model", "l*", "--json").stdout)
    assert matching["total"] == letters
    assert {row["model"] for row in matching["rows"]} == {"letters"}
    assert "no model with usage matches 'x*'" in serving.modelctl("usage", "--model", "x*").stderr
    assert serving.modelctl("usage", "--since", "yesterday").returncode == 2


@pytest.mark.long
def test_what_dying_workers_had_begun_counts_once(serving: Serving) -> None:
    """Each answer goes on in another worker, is cancelled, or ends with an error. The clients count what they get."""
    counted, unsure, errors, lock = Counter[str](), Counter[str](), set[ErrorCode](), threading.Lock()

    def asks(client: Client, number: int) -> None:
        for turn in range(6):
            prompt = f"client {number} turn {turn}"
            stream = client.generate("letters", prompt, max_tokens=150, resume=turn != 5)
            tokens, error = 0, None
            try:
                for delta in stream:
                    tokens += len(delta.token_ids)
                    if turn == 4 and tokens >= 20:
                        stream.cancel()
            except WireError as e:
                error = e.code
                errors.add(error)
            with lock:
                counted["requests"] += 1
                # of an answer without a token, the client cannot know whether a worker had begun to read the prompt
                (unsure if error and not tokens else counted)["prompt_tokens"] += len(prompt)
                counted["completion_tokens"] += tokens

    clients = [serving.client() for _ in range(4)]
    threads = [threading.Thread(target=asks, args=(client, i)) for i, client in enumerate(clients)]
    for thread in threads:
        thread.start()
    deaths = 0
    while any(thread.is_alive() for thread in threads):
        worker = serving.status(f"letters:{deaths % 2 + 1}")
        if worker["state"] == "ready" and worker["active"]:
            psutil.Process(worker["pid"]).kill()
            deaths += 1
            wait_until(lambda: serving.status(f"letters:{(deaths - 1) % 2 + 1}")["generation"] > worker["generation"])  # noqa: B023
        threads[0].join(0.05)
    with serving.client() as client:
        found = total(client)
    assert 0 <= found.pop("prompt_tokens") - counted.pop("prompt_tokens") <= unsure["prompt_tokens"]
    assert found == {"cached_tokens": 0, **counted}
    assert errors <= {ErrorCode.WORKER_DIED}
    assert deaths >= 2
    for client in clients:
        client.close()


def test_a_killed_supervisor_has_counted_what_it_handed_over(serving: Serving) -> None:
    streams = 8
    with serving.client() as client:
        answers = [client.generate("letters", f"prompt {i}", max_tokens=4000) for i in range(streams)]
        counts = [0] * streams
        iterators = [iter(answer) for answer in answers]
        for i, iterator in enumerate(iterators):
            while counts[i] < 20:
                counts[i] += len(next(iterator).token_ids)
        serving.kill()
        for i, iterator in enumerate(iterators):
            counts[i] += rest(iterator)
    serving.start_again({"letters": engine()})
    with serving.client() as client:
        found = total(client)
    assert found["prompt_tokens"] == sum(len(f"prompt {i}") for i in range(streams))
    assert 0 <= found["completion_tokens"] - sum(counts) <= WINDOW * streams


@pytest.mark.long
def test_a_dead_writer_is_replaced_and_nothing_is_lost_or_counted_twice(serving: Serving) -> None:
    with serving.client() as client:
        client.complete("letters", "hello", max_tokens=7)
        assert total(client)["completion_tokens"] == 7
        first = wait_until(lambda: writer(serving))
        first.kill()
        wait_until(lambda: f"the writer, process {first.pid}, ended with signal 9" in serving.log())
        client.complete("letters", "hello", max_tokens=5)
        wait_until(lambda: (found := writer(serving)) is not None and found.pid != first.pid)
        wait_until(lambda: serving.overview()["supervisor"]["usage"]["trouble"] is None)
        assert total(client)["completion_tokens"] == 12
    assert f"usage: the counts are written to {serving.runtime_dir}/usage.sqlite3 again" in serving.log()


def test_a_disk_that_hangs_holds_no_request_up(serving: Serving) -> None:
    """A stopped writer stands for one that waits in the kernel for its disk. It says nothing, and cannot be killed."""
    with serving.client() as client, ThreadPoolExecutor() as pool:
        client.complete("letters", "hello", max_tokens=7)
        process = wait_until(lambda: writer(serving))
        process.suspend()
        try:
            asked = pool.submit(client.usage)
            for number in range(20):
                assert len(client.complete("letters", f"{number}", max_tokens=5).token_ids) == 5
            assert not asked.done()
        finally:
            process.resume()
        assert asked.result(WITHIN)["total"]["completion_tokens"] == 7 + 20 * 5


def test_a_broken_file_costs_no_request_and_its_counts_come_later(serving: Serving) -> None:
    file = serving.runtime_dir / "usage.sqlite3"
    with serving.client() as client:
        client.complete("letters", "hello", max_tokens=7)
        assert total(client)["completion_tokens"] == 7
        process = wait_until(lambda: writer(serving))
        limits = process.rlimit(psutil.RLIMIT_FSIZE)
        process.rlimit(psutil.RLIMIT_FSIZE, (0, limits[1]))  # no byte can be written, as on a full disk
        client.complete("letters", "hello", max_tokens=3)
        with pytest.raises(
            WireError, match=r"usage.sqlite3 cannot be used: .*; mend that; the counts are kept"
        ) as full:
            wait_until(lambda: not total(client))
        assert full.value.code is ErrorCode.HELPER_FAILED
        assert "cannot be used" in wait_until(lambda: serving.overview()["supervisor"]["usage"]["trouble"])
        assert "the counts are kept in memory" in serving.modelctl("status").stdout
        process.rlimit(psutil.RLIMIT_FSIZE, limits)
        wait_until(lambda: serving.overview()["supervisor"]["usage"]["trouble"] is None)
        assert total(client)["completion_tokens"] == 10
        file.rename(file.with_name("away"))
        client.complete("letters", "hello", max_tokens=1)
        assert total(client)["completion_tokens"] == 11, "a new file has all counts of this supervisor's life"
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("SELECT sum(completion_tokens) FROM usage").fetchone() == (11,)


@pytest.mark.long
@pytest.mark.parametrize("broken", ["corrupt", "read-only"])
def test_what_cannot_be_written_at_the_end_is_said(serving: Serving, broken: str) -> None:
    file = serving.runtime_dir / "usage.sqlite3"
    with serving.client() as client:
        client.complete("letters", "hello", max_tokens=7)
        assert total(client)["completion_tokens"] == 7
        serving.order("shutdown")
        serving.process.wait(WITHIN)
    if broken == "corrupt":
        file.write_bytes(b"no database " * 1000)
        wrong = r"usage.sqlite3 cannot be used: file is not a database; move the file away, and a new one is made"
    else:
        file.unlink()
        file.mkdir()  # even a root's process cannot write to it
        wrong = r"usage.sqlite3 cannot be used: unable to open database file; mend that"
    serving.start_again({"letters": engine()})
    with serving.client() as client:
        client.complete("letters", "hello", max_tokens=4)
        with pytest.raises(WireError, match=wrong):
            client.usage()
        serving.order("shutdown")
        serving.process.wait(WITHIN)
    assert "usage: 1 requests and 9 tokens are not in" in serving.log()


def test_keys_see_their_own_usage_and_operators_see_all() -> None:
    port = free_port()
    with Keyed({"letters": engine()}, {"laptop": "infer", "boss": "status"}, gateway={"listen": port}) as keyed:
        web, ops = keyed.new_http("web"), keyed.new_http("ops", "infer,admin")
        keyed.new("guest", rights="infer,admin", models=("stories*",))
        with keyed.client("laptop") as laptop, keyed.client("boss") as boss, keyed.serving.client() as local:
            laptop.complete("letters", "hello", max_tokens=3)
            local.complete("letters", "hello", max_tokens=4)
            local.complete("letters", "hello", max_tokens=5, on_behalf_of=hashlib.sha256(web.encode()).hexdigest())
            assert {row["key"]: row["completion_tokens"] for row in boss.usage()["rows"]} == {
                None: 4,
                "laptop": 3,
                "web": 5,
            }
            assert boss.usage(key="web")["total"]["completion_tokens"] == 5
            assert local.usage(key="")["total"]["completion_tokens"] == 4
            assert [row["key"] for row in laptop.usage()["rows"]] == ["laptop"]
            assert laptop.usage(key="laptop") == laptop.usage()
            with pytest.raises(WireError, match="key 'laptop' sees its own usage only") as refused:
                laptop.usage(key="web")
            assert (refused.value.code, refused.value.field) == (ErrorCode.FORBIDDEN, "key")
        with keyed.client("guest") as guest:
            assert guest.usage()["rows"] == [], "an operator of other models only"

        def get(path: str, token: str) -> Any:
            return ask(port, path, headers={"authorization": f"Bearer {token}"})

        assert [row["completion_tokens"] for row in get("/v1/usage", web)["rows"]] == [5]
        assert get("/v1/usage", ops)["total"]["completion_tokens"] == 12
        assert get("/v1/usage?key=laptop&model=letters", ops)["total"]["completion_tokens"] == 3
        with pytest.raises(AssertionError, match="must be a day such as 2026-01-31"):
            get("/v1/usage?since=today", ops)
        with pytest.raises(AssertionError, match="unknown parameter"):
            get("/v1/usage?days=3", ops)


def test_a_key_or_model_that_nothing_knows_is_refused() -> None:
    with Keyed({"letters": engine(), "unused": engine()}, {"laptop": "infer", "idle": "infer"}) as keyed:
        serving = keyed.serving
        with keyed.client("laptop") as laptop:
            laptop.complete("letters", "hello", max_tokens=3)

        def asked(*arguments: str) -> tuple[int, str]:
            done = serving.modelctl("usage", *arguments)
            return done.returncode, done.stderr

        keyed.store.revoke("laptop")
        wait_until(lambda: "laptop" not in str(serving.overview()["supervisor"]["tcp"]["keys"]), what="the revocation")
        for known in (("--key", "laptop"), ("--key", "idle"), ("--key", ""), ("--model", "unused"), ("--since", "1d")):
            assert asked(*known) == (0, ""), known
        assert asked("--key", "idl") == (
            1, "modelctl: no key 'idl' is admitted, and none of that name has used anything: did you mean 'idle'?\n",
        )  # fmt: skip
        assert asked("--model", "nosuch")[1].endswith("no model 'nosuch' is configured: there is letters, unused\n")
        assert asked("--model", "lettres")[1].endswith("no model 'lettres' is configured; did you mean 'letters'?\n")


def test_an_alias_and_a_variant_count_for_the_model_itself() -> None:
    names = {"aliases": ["gpt"], "variants": {"short": {"sampling": {"max_tokens": 2}}}}
    with Serving({"letters": engine(**names)}) as serving, serving.client() as client:
        client.complete("gpt:short", "hello")
        (row,) = client.usage(model="gpt")["rows"]
        assert (row["model"], row["completion_tokens"]) == ("letters", 2)


def test_the_ledger_can_be_switched_off() -> None:
    with Serving({"letters": engine()}, usage={"record": False}) as serving, serving.client() as client:
        assert client.complete("letters", "hello", max_tokens=3).usage["completion_tokens"] == 3
        with pytest.raises(WireError, match=r"supervisor.usage.record in models.yaml is false"):
            client.usage()
        assert serving.overview()["supervisor"]["usage"] is None
        assert writer(serving) is None
