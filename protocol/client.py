"""``Client``: requests to a supervisor, blocking.

    with Client() as client:
        for delta in client.generate("letters", "sort: d b a c ->", max_tokens=32, temperature=0):
            print(delta.text, end="")

One client is one connection, made when the client is. When it ends, every unfinished request raises ConnectionLost
once, and so does every later call: reconnecting is making a new ``Client``. A client belongs to the thread and the
process that made it and refuses any other with RuntimeError.

Events arrive, and the supervisor's questions are answered, while a method of the client runs or a stream is read. A
client that is left alone for long is still alive to the supervisor: libzmq's own thread keeps the connection up. An
interrupt (Ctrl-C) that lands just as a frame is taken in ends the connection, since the frame may be lost.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Self

import zmq

from protocol.answers import Completion, Delta, StreamState, TokenLogprob
from protocol.asking import generate_body
from protocol.connection import Connection, check_can_generate, check_welcomed
from protocol.errors import ConnectionLost
from protocol.stream import StreamBase

__all__ = ["Client", "Completion", "Delta", "Stream", "TokenLogprob"]

_LONGEST_POLL_S: Final = 60.0


class Stream(StreamBase):
    """The answer to one request, as it comes: iterate over it for ``Delta`` objects.

    Leaving the loop (break, an exception, ``close()``, or dropping the stream) cancels the request. ``cancel()`` asks
    for its end and lets you read up to it, where ``finish_reason`` is "cancelled". Iterating raises WireError with the
    code the request ended with (ConnectionLost among them), once; TimeoutError as ``generate`` says.
    """

    def __init__(self, client: "Client", connection: Connection, state: StreamState, timeout: float | None) -> None:
        super().__init__(connection, state)
        self._client = client
        self._timeout = timeout

    def __iter__(self) -> Iterator[Delta]:
        # an object of its own, which dies with the loop: the loop was left even where the stream is still referred to
        return _Loop(self)

    def __next__(self) -> Delta:
        self._connection.check_thread()
        while True:
            if self._state.abandoned:
                raise StopIteration
            delta = self._take()
            if delta is not None:
                return delta
            if self._state.ended:
                raise StopIteration
            self._wait_for_event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def complete(self) -> Completion:
        """Reads to the end; the whole answer."""
        for _ in self:
            pass
        return self._completion()

    def _wait_for_event(self) -> None:
        before = self._state.arrivals
        if not self._client._wait(lambda: self._state.ended or self._state.arrivals != before, self._timeout):
            self.close()
            raise TimeoutError(f"no event of request {self.request_id} within {self._timeout} s: it was cancelled")


class _Loop:
    """What a ``for`` loop holds. Its end is the end of the loop."""

    __slots__ = ("_stream",)

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __iter__(self) -> "_Loop":
        return self

    def __next__(self) -> Delta:
        return next(self._stream)

    def __del__(self) -> None:
        self._stream._abandon()


class Client:
    """A connection to the supervisor.

    endpoint     a ZeroMQ endpoint; unset is the front socket in the runtime directory
    runtime_dir  the supervisor's directory; unset is ``protocol.runtime_paths.default_runtime_dir()``
    timeout      seconds to wait for the supervisor's greeting, and for the answers of ``models`` and ``status``
    admin        connect to the operators' socket, which takes ``call`` only

    Waits for the greeting. Raises ConnectionLost if no supervisor listens there (at once) or none answers (after
    ``timeout``); WireError if it refuses this client (bad_version, draining); ValueError for a socket path that is too
    long.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        runtime_dir: str | os.PathLike[str] | None = None,
        timeout: float = 5.0,
        admin: bool = False,
    ) -> None:
        self.timeout = timeout
        self._connection = Connection(endpoint, runtime_dir=runtime_dir, admin=admin)
        self._poller = zmq.Poller()
        self._poller.register(self._connection.socket, zmq.POLLIN)
        self._poller.register(self._connection.monitor, zmq.POLLIN)
        try:
            if not self._wait(lambda: check_welcomed(self._connection), timeout):
                raise ConnectionLost(f"the supervisor at {self.endpoint} did not answer within {timeout} s")
        except BaseException:
            self._connection.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        return self._connection.endpoint

    @property
    def server(self) -> dict[str, Any]:
        """What the supervisor said of itself in its greeting: {server, session, window, ...}."""
        return dict(self._connection.session.welcome or {})

    def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        token_ids: Iterable[int] | bytes | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        resume: bool = False,
        timeout: float | None = None,
        **sampling: Any,
    ) -> Stream:
        """Sends a request, without waiting; its answer is read from the stream returned.

        prompt, messages, token_ids  exactly one: text taken as it is; [{"role", "content"}, ...]; ids (or bytes, u32
                                     little endian)
        max_tokens  most tokens to generate; unset is what is left of the model's context
        stop        strings that end the answer
        resume      whether the answer may go on after the death of its worker
        timeout     seconds without any event of this request, while it is read, after which it is cancelled and
                    TimeoutError raised; unset waits while the connection lives (a model may be loading)
        sampling    temperature, top_k, min_tokens, logprobs, ...: the fields of protocol.request.GenerateRequest, or
                    their other names; None is unset

        Raises WireError: too_large, draining, connection_lost, invalid_request (a value that cannot be sent). All else
        that is wrong with the request is raised from the stream, naming the field.
        """
        self._use()
        check_can_generate(self._connection)
        body = generate_body(prompt, messages, token_ids, max_tokens, stop, sampling)
        stream = Stream(self, self._connection, self._connection.session.generate(model, body, resume=resume), timeout)
        self._connection.pump()
        return stream

    def complete(self, model: str, prompt: str | None = None, **request: Any) -> Completion:
        """The whole answer; takes what ``generate`` takes and raises what its stream raises."""
        return self.generate(model, prompt, **request).complete()

    def call(self, verb: str, /, *, reply_timeout: float | None = None, **params: Any) -> dict[str, Any]:
        """Asks the supervisor something else; the map it answered.

        reply_timeout  seconds; unset waits while the connection lives

        Raises WireError with the code the supervisor answered, ConnectionLost, TimeoutError.
        """
        self._use()
        state = self._connection.session.call(verb, params)
        try:
            if not self._wait(lambda: state.ended, reply_timeout):
                raise TimeoutError(f"no answer to {verb} within {reply_timeout} s")
        finally:
            self._connection.session.forget_call(state)
        if state.error is not None:
            raise state.error
        return state.result

    def models(self) -> dict[str, Any]:
        """``call("models")``."""
        return self.call("models", reply_timeout=self.timeout)

    def status(self, model: str | None = None) -> dict[str, Any]:
        """``call("status")``, of one model or of all."""
        params = {} if model is None else {"model": model}
        return self.call("status", reply_timeout=self.timeout, **params)

    def close(self) -> None:
        """Ends the connection, and with it every unfinished request. Repeating it does nothing."""
        self._connection.close()

    def _use(self) -> None:
        self._connection.check_usable()
        # notices a connection that ended since, and answers what came, before anything new is sent
        self._connection.pump()

    def _wait(self, done: Callable[[], bool], timeout: float | None) -> bool:
        """Pumps until ``done``; False if ``timeout`` seconds passed first. Sees the end of the connection, too."""
        connection, poller = self._connection, self._poller
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            connection.pump()
            if done():
                return True
            left = _LONGEST_POLL_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            poller.modify(connection.socket, zmq.POLLIN | (zmq.POLLOUT if connection.waits_to_send else 0))
            # rounded up: a poll of 0 ms for the last fraction would spin
            poller.poll(int(min(left, _LONGEST_POLL_S) * 1000) + 1)
