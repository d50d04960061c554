"""Mixed requests through the gateway and the Python client, whose tokens the clients count, to compare with the ledger.

The engine of most requests is ``benchmarks.caching_engine``. Each of its tokens is one character of text, so the text
of an answer is a second count. Constrained requests go to a demo model.
"""

import http.client
import json
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final

from modelctl import Client
from protocol.errors import WireError

COUNTS: Final = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens")
SHARED: Final = "".join(chr(ord("a") + i * i % 26) for i in range(300))
"""The beginning of prompts that the cache of the engine finds."""
DIGITS: Final = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
WITHIN: Final = 120.0


class NotServed(Exception):
    """A request was refused, or its answer ended with an error. The message says which one."""


@dataclass
class Tally:
    """The counts of all clients.

    counted    (name of the key or None, model) → the counts, by the names of the ledger
    kinds      finished requests of each kind
    problems   what went wrong, such as errors, and texts whose length was not the number of tokens
    """

    counted: dict[tuple[str | None, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    kinds: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, key: str | None, model: str, usage: dict[str, Any], answers: int = 1) -> None:
        """Count one request. ``answers`` is the ``n`` of a request over HTTP, whose usage has its prompt once."""
        cached = usage.get("cached_tokens", usage.get("prompt_tokens_details", {}).get("cached_tokens", 0))
        with self.lock:
            self.counted[key, model].update(
                requests=answers, prompt_tokens=answers * usage["prompt_tokens"], cached_tokens=cached,
                completion_tokens=usage["completion_tokens"],
            )  # fmt: skip


def differences(tally: Tally, rows: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Return for each of the ledger's counts how far it is from the clients' counts, added up over keys and models."""
    ledger: dict[tuple[str | None, str], Counter[str]] = defaultdict(Counter)
    for row in rows:  # two rows of one key and model if midnight has passed
        ledger[row["key"], row["model"]].update({name: row[name] for name in COUNTS})
    pairs = ledger.keys() | tally.counted.keys()
    return {name: sum(abs(ledger[pair][name] - tally.counted[pair][name]) for pair in pairs) for name in COUNTS}


class Mixed:
    """Makes mixed requests in several threads.

    port         of the gateway
    tokens       name of an HTTP key → its token
    local        makes a Python client without a key
    constrained  the name of a model that takes JSON schemas; None for no such requests
    """

    def __init__(
        self, port: int, tokens: dict[str, str], local: Callable[[], Client], constrained: str | None = None
    ) -> None:
        self._port, self._tokens, self._local, self._constrained = port, tokens, local, constrained
        self.tally = Tally()
        self._kinds: list[Callable[[random.Random, Client, str], None]] = [
            self._whole, self._streamed, self._cancelled, self._http_whole, self._http_streamed, self._http_chat,
            self._http_several, self._http_cached, *([self._http_constrained] if constrained else []),
        ]  # fmt: skip

    def ask(self, requests: int, threads: int, seed: int) -> None:
        """Make this many requests, of all kinds in equal numbers, and return when all have ended."""
        kinds = [self._kinds[i % len(self._kinds)] for i in range(requests)]
        random.Random(seed).shuffle(kinds)

        def some(thread: int) -> None:
            chance = random.Random(seed * threads + thread)
            with self._local() as client:
                for number in range(thread, requests, threads):
                    self._one(kinds[number], chance, client, f"{number}: {chance.getrandbits(32)}")

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(some, range(threads)))

    def _one(
        self, kind: Callable[[random.Random, Client, str], None], chance: random.Random, client: Client, prompt: str
    ) -> None:
        name = kind.__name__.lstrip("_")
        try:
            kind(chance, client, prompt)
        except (WireError, NotServed, OSError, http.client.HTTPException) as e:
            with self.tally.lock:
                self.tally.problems.append(f"{name}: {type(e).__name__}: {e}")
        else:
            with self.tally.lock:
                self.tally.kinds[name] += 1

    def _check(self, text: str, tokens: int) -> None:
        if len(text) != tokens:
            raise NotServed(f"{len(text)} characters are not {tokens} tokens")

    # --- the Python client --------------------------------------------------------------------------------------

    def _whole(self, chance: random.Random, client: Client, prompt: str) -> None:
        answer = client.complete("echo", prompt, max_tokens=chance.randint(1, 150))
        self.tally.add(None, "echo", answer.usage)
        self._check(answer.text, answer.usage["completion_tokens"])

    def _streamed(self, chance: random.Random, client: Client, prompt: str) -> None:
        stream = client.generate("echo", SHARED + prompt, max_tokens=chance.randint(1, 150))
        tokens = sum(len(delta.token_ids) for delta in stream)
        self.tally.add(None, "echo", stream.usage | {"completion_tokens": tokens})
        self._check(stream.text, stream.usage["completion_tokens"])

    def _cancelled(self, chance: random.Random, client: Client, prompt: str) -> None:
        stream, tokens, most = client.generate("echo", prompt, max_tokens=400), 0, chance.randint(0, 60)
        if not most:
            stream.cancel()
        for delta in stream:
            tokens += len(delta.token_ids)
            if tokens >= most:
                stream.cancel()
        self.tally.add(None, "echo", stream.usage | {"completion_tokens": tokens})

    # --- over HTTP ----------------------------------------------------------------------------------------------

    def _http_whole(self, chance: random.Random, client: Client, prompt: str) -> None:
        self._completion(chance, {"model": "echo", "prompt": prompt, "max_tokens": chance.randint(1, 150)})

    def _http_cached(self, chance: random.Random, client: Client, prompt: str) -> None:
        self._completion(chance, {"model": "echo", "prompt": SHARED + prompt, "max_tokens": chance.randint(1, 50)})

    def _http_several(self, chance: random.Random, client: Client, prompt: str) -> None:
        """Ask for several answers to a prompt that is too short for the cache: the usage would not tell how often."""
        self._completion(chance, {"model": "echo", "prompt": prompt, "max_tokens": chance.randint(1, 50), "n": 3})

    def _http_constrained(self, chance: random.Random, client: Client, prompt: str) -> None:
        shape = {"type": "json_schema", "json_schema": {"name": "digits", "schema": DIGITS}}
        body = {"model": self._constrained, "prompt": "sort: d b a c ->", "max_tokens": 12, "response_format": shape}
        self._completion(chance, body, a_character_is_a_token=False)

    def _http_streamed(self, chance: random.Random, client: Client, prompt: str) -> None:
        key, token = chance.choice(sorted(self._tokens.items()))
        body = {"model": "echo", "prompt": prompt, "max_tokens": chance.randint(1, 150)}
        text, usage = "", dict[str, Any]()
        for event in events(self._port, token, "/v1/completions", body | {"stream_options": {"include_usage": True}}):
            if "error" in event:
                raise NotServed(str(event["error"]))
            text += "".join(choice["text"] for choice in event["choices"])
            usage = event.get("usage") or usage
        self.tally.add(key, "echo", usage)
        self._check(text, usage["completion_tokens"])

    def _http_chat(self, chance: random.Random, client: Client, prompt: str) -> None:
        key, token = chance.choice(sorted(self._tokens.items()))
        messages = [{"role": "system", "content": SHARED}, {"role": "user", "content": prompt}]
        body = {"model": "echo", "messages": messages, "max_tokens": chance.randint(1, 150)}
        answer = whole(self._port, token, "/v1/chat/completions", body)
        self.tally.add(key, "echo", answer["usage"])
        self._check(answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"])

    def _completion(self, chance: random.Random, body: dict[str, Any], *, a_character_is_a_token: bool = True) -> None:
        key, token = chance.choice(sorted(self._tokens.items()))
        answer = whole(self._port, token, "/v1/completions", body)
        self.tally.add(key, body["model"], answer["usage"], body.get("n", 1))
        if a_character_is_a_token:
            self._check("".join(c["text"] for c in answer["choices"]), answer["usage"]["completion_tokens"])


def whole(port: int, token: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON of an answer. Raises NotServed."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        response = _ask(connection, token, path, body)
        answer: dict[str, Any] = json.loads(response.read())
        return answer


def events(port: int, token: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed answer. Raises NotServed, also if the stream has no end."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN)) as connection:
        response = _ask(connection, token, path, body | {"stream": True})
        for line in response:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                yield json.loads(line[6:])
        raise NotServed("the stream broke off")


def _ask(
    connection: http.client.HTTPConnection, token: str, path: str, body: dict[str, Any]
) -> http.client.HTTPResponse:
    connection.request("POST", path, json.dumps(body), {"authorization": f"Bearer {token}"})
    response = connection.getresponse()
    if response.status != 200:
        raise NotServed(f"status {response.status}: {response.read()[:300].decode(errors='replace')}")
    return response
