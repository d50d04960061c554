"""``Client``: requests to a supervisor, blocking.

    with Client() as client:
        for delta in client.generate("letters", "sort: d b a c ->", max_tokens=32, temperature=0):
            print(delta.text, end="")

**Connections.** When the connection ends, every unfinished request raises ConnectionLost once, after what had arrived;
nothing is sent again. The next ``generate`` or ``call`` connects anew. **Waiting** never lasts for ever: a supervisor
that was stopped is noticed within 5 s (libzmq's heartbeats; 12 s over TCP), one that hangs within ``silence`` (PING),
and both are ConnectionLost. A request that is only slow is waited for.

**Threads** of one process may share a client, each reading its own streams. A signal handler may cancel a stream, and
nothing else. After a fork the client refuses with RuntimeError: make one in each process.

Events arrive, and the supervisor's questions are answered, while a method of the client runs or a stream is read. A
client that is left alone for long is still alive to the supervisor: libzmq's own thread keeps the connection up. An
interrupt (Ctrl-C) that lands just as a frame is taken in ends the connection, since the frame may be lost.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self

from protocol.answers import Completion, Delta, Progress, StreamState, TokenLogprob, text_in, token_ids_in
from protocol.asking import choice_requests, generate_request, pack_token_ids, tokenize_params
from protocol.client_key import ClientKey
from protocol.connection import check_can_generate
from protocol.errors import ConnectionLost
from protocol.liveness import DEFAULT_SILENCE_S
from protocol.shared_connection import SharedConnection
from protocol.stream import OnProgress
from protocol.streams import Choices, Stream

__all__ = ["Choices", "Client", "Completion", "Delta", "Progress", "Stream", "TokenLogprob"]


class Client:
    """A connection to the supervisor.

    endpoint         a ZeroMQ endpoint; unset is the front socket in the runtime directory
    runtime_dir      the supervisor's directory; unset is ``protocol.runtime_paths.default_runtime_dir()``
    timeout          seconds to wait for the supervisor's greeting now, and for the answers of ``models`` and ``status``
    admin            connect to the operators' socket, which takes ``call`` only
    key              for an endpoint over TCP (``tcp://HOST:PORT``): the file that `modelctl keys new` wrote, or a
                     ClientKey
    reconnect        whether to connect anew, once the connection was lost, for the next request or call; else each
                     raises ConnectionLost
    connect_timeout  seconds that this may take. Where nobody listens it is tried again and again, after pauses from
                     0.05 to 2 s that double, less a random half
    silence          seconds without any sign of life of the supervisor, while something is unfinished and waited for,
                     after which the connection counts as lost; a third of it before a PING is sent

    Waits for the greeting. Raises ConnectionLost if no supervisor or another user listens there (at once) or none
    answers (after ``timeout``); WireError if it refuses this client (unauthorized, bad_version, draining); ValueError
    for a socket path that is too long, or a key file that cannot be used.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        runtime_dir: str | os.PathLike[str] | None = None,
        timeout: float = 5.0,
        admin: bool = False,
        key: ClientKey | str | os.PathLike[str] | None = None,
        reconnect: bool = True,
        connect_timeout: float = 1.0,
        silence: float = DEFAULT_SILENCE_S,
    ) -> None:
        self.timeout = timeout
        self._connect_timeout = connect_timeout
        self._reconnect = reconnect
        self._closed = False
        self._reconnecting = threading.Lock()
        self._failed: tuple[float, ConnectionLost] | None = None
        self._new_connection: Callable[..., SharedConnection] = lambda **how: SharedConnection(
            endpoint, runtime_dir=runtime_dir, admin=admin, key=key, silence=silence, **how
        )
        self._connection = self._connect(patience=timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        return self._connection.endpoint

    @property
    def server(self) -> dict[str, Any]:
        """What the supervisor said of itself in its last greeting: {server, session, window, ...}."""
        return dict(self._connection.session.welcome or {})

    def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        token_ids: Iterable[int] | bytes | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
        json_schema: dict[str, Any] | str | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        temperature: float | None = None,
        seed: int | None = None,
        resume: bool = True,
        priority: str | None = None,
        queue_ms: int | None = None,
        ttft_ms: int | None = None,
        deadline_ms: int | None = None,
        affinity: str | None = None,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Stream:
        """Sends a request, without waiting; its answer is read from the stream returned.

        What is asked, exactly one of:
        prompt           text, taken as it is
        messages         [{"role", "content"}, ...], rendered by the model's own chat template; with ``tools``
                         (descriptions of functions) and ``template_kwargs`` (more variables by name) as that takes them
        token_ids        ids, or bytes (u32, little endian)

        What the answer must look like, at most one of:
        json_schema      a JSON schema, as a dict or as JSON text; the answer has no white space between its parts,
                         unless ``whitespace_flexible=True`` is given, too
        regex            a regular expression that the whole answer matches
        choice           texts, of which the answer is one

        When it ends, and how its tokens are drawn:
        max_tokens       most tokens; unset is what is left of the model's context
        stop             strings that end the answer, or one string
        temperature      0 is greedy
        seed             of this request's draws; unset draws one
        sampling         top_k, min_tokens, logprobs, ...: the other fields of protocol.request.GenerateRequest, or
                         their other names

        How it is served:
        resume           when its worker dies, the answer goes on in another: no token twice, none missing
        priority         "interactive", "normal" (the default) or "batch"
        queue_ms         longest wait for a worker; a request that waits longer ends with queue_timeout
        ttft_ms          longest wait for the first token, and ``deadline_ms`` for the end; deadline_exceeded
        affinity         up to 256 characters: requests with the same key go to the same worker, where their prefix is
                         cached; unset, the beginning of the prompt stands for it
        on_progress      called with ``Progress`` objects until the first token, by whoever reads the stream, while it
                         does; what it raises is raised there
        timeout          seconds without any event of this request, while it is read, after which it is cancelled and
                         TimeoutError raised; unset waits while the supervisor answers (a model may be loading)

        None is unset everywhere. Raises ConnectionLost (none could be made anew), and WireError: too_large, draining,
        invalid_request (a value that cannot be sent). All else that is wrong with the request is raised from the
        stream, naming the field.
        """
        given = sampling | {
            "prompt": prompt,
            "messages": messages,
            "token_ids": token_ids,
            "tools": tools,
            "template_kwargs": template_kwargs,
            "json_schema": json_schema,
            "regex": regex,
            "choice": choice,
            "max_tokens": max_tokens,
            "stop": stop,
            "temperature": temperature,
            "seed": seed,
            "resume": resume,
            "priority": priority,
            "queue_ms": queue_ms,
            "ttft_ms": ttft_ms,
            "deadline_ms": deadline_ms,
            "affinity": affinity,
            "progress": on_progress is not None,
        }
        connection, (state,) = self._begin(model, [given])
        return Stream(connection, state, timeout, on_progress)

    def choices(
        self,
        model: str,
        prompt: str | None = None,
        *,
        n: int,
        on_progress: Callable[[int, Progress], None] | None = None,
        timeout: float | None = None,
        **request: Any,
    ) -> Choices:
        """``n`` answers to one prompt: as many requests, sent together, that share the prompt's cache.

        n            1 to 1024
        on_progress  called with (index, ``Progress``)
        timeout      seconds without any event of any of them
        request      what ``generate`` takes. With a ``seed``, choice i has seed + i; without, each draws its own
        """
        requests = choice_requests({"prompt": prompt, "progress": on_progress is not None} | request, n)
        connection, states = self._begin(model, requests)
        told = [on_progress and partial(on_progress, i) for i in range(n)]
        streams = (Stream(connection, state, timeout, tell) for state, tell in zip(states, told, strict=True))
        return Choices(tuple(streams), timeout)

    def complete(self, model: str, prompt: str | None = None, **request: Any) -> Completion:
        """The whole answer; takes what ``generate`` takes and raises what its stream raises."""
        return self.generate(model, prompt, **request).complete()

    def tokenize(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        reply_timeout: float | None = None,
        **template: Any,
    ) -> tuple[int, ...]:
        """The token ids that the model would see for this prompt, or for these messages through its chat template.

        template       tools, template_kwargs: what else the template is given
        reply_timeout  seconds; unset waits while the supervisor answers

        Raises as ``call`` does.
        """
        params = tokenize_params(model, template | {"prompt": prompt, "messages": messages})
        return token_ids_in(self._call("tokenize", params, reply_timeout))

    def detokenize(self, model: str, token_ids: Iterable[int] | bytes, *, reply_timeout: float | None = None) -> str:
        """The text of these ids (or bytes, u32 little endian). Waits and raises as ``tokenize`` does."""
        params = {"model": model, "token_ids": pack_token_ids(token_ids)}
        return text_in(self._call("detokenize", params, reply_timeout))

    def call(self, verb: str, /, *, reply_timeout: float | None = None, **params: Any) -> dict[str, Any]:
        """Asks the supervisor something else; the map it answered.

        reply_timeout  seconds; unset waits while the supervisor answers

        Raises WireError with the code the supervisor answered, ConnectionLost, TimeoutError.
        """
        return self._call(verb, params, reply_timeout)

    def models(self) -> dict[str, Any]:
        """``call("models")``."""
        return self.call("models", reply_timeout=self.timeout)

    def status(self, model: str | None = None) -> dict[str, Any]:
        """``call("status")``, of one model or of all."""
        params = {} if model is None else {"model": model}
        return self.call("status", reply_timeout=self.timeout, **params)

    def close(self) -> None:
        """Ends the connection, and with it every unfinished request. Repeating it does nothing."""
        self._closed = True
        self._connection.close()

    def _begin(self, model: str, given: Sequence[dict[str, Any]]) -> tuple[SharedConnection, list[StreamState]]:
        requests = [(model, *generate_request(each)) for each in given]
        connection = self._usable()
        check_can_generate(connection)
        return connection, connection.begin(requests)

    def _call(self, verb: str, params: dict[str, Any], reply_timeout: float | None) -> dict[str, Any]:
        connection = self._usable()
        state = connection.ask(verb, params)
        try:
            if not connection.wait([state], lambda: state.ended, reply_timeout):
                raise TimeoutError(f"no answer to {verb} within {reply_timeout} s")
        finally:
            connection.forget(state)
        if state.error is not None:
            raise state.error
        return state.result

    def _connect(self, **how: Any) -> SharedConnection:
        connection = self._new_connection(**how)
        try:
            connection.wait_welcome()
        except BaseException:
            connection.close()
            raise
        return connection

    def _usable(self) -> SharedConnection:
        """The connection, or a new one if it was lost."""
        connection, asked_at = self._connection, time.monotonic()
        connection.check()
        if self._closed:
            raise RuntimeError("this client was closed: make a new one")
        if not connection.is_lost() or not self._reconnect:
            return connection
        with self._reconnecting:
            if self._connection is not connection:
                return self._connection  # another thread was faster
            if self._failed is not None and self._failed[0] > asked_at:
                raise ConnectionLost(self._failed[1].message)  # another thread has just tried for as long
            try:
                new = self._connect(patience=self._connect_timeout, redial=True)
            except ConnectionLost as e:
                self._failed = time.monotonic(), e
                raise
            self._connection = new
            connection.close()
            if self._closed:  # by another thread, meanwhile
                new.close()
        return new
