"""``Client``: send requests to a supervisor from blocking code.

    with Client() as client:
        for delta in client.generate("letters", "sort: d b a c ->", max_tokens=32, temperature=0):
            print(delta.text, end="")

libzmq's heartbeats detect a stopped supervisor, and PING detects a supervisor that hangs. The client waits for a
request that is only slow. A signal handler may cancel a stream, and must not call anything else of the client. After a
fork the client raises RuntimeError.

The client reads from its socket while one of its methods runs or a stream is read. An idle client keeps its connection,
because libzmq's own thread answers the supervisor's heartbeats. An interrupt (Ctrl-C) that arrives while the client
takes in a frame ends the connection, because that frame may be lost.
"""

import math
import os
import select
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, Protocol, Self, TypeVar, Unpack

from protocol.client.answers import (
    Completion,
    Delta,
    Embeddings,
    Progress,
    StreamState,
    TokenLogprob,
    Touched,
    text_in,
    token_ids_in,
)
from protocol.client.connection import Connection, check_welcomed
from protocol.client.request_options import (
    USAGE_S,
    RequestOptions,
    RouteOptions,
    choice_requests,
    collect_options,
    embed_options,
    given,
    pack_token_ids,
    rerank_options,
    tokenize_params,
)
from protocol.client.stream_base import ChoicesBase, ClientBase, OnProgress, StreamBase
from protocol.client.transport import Transport
from protocol.errors import ConnectionLost
from protocol.messages import Embed, Generate, Rerank

# A connection that the threads of a process share.
#
# There is one lock, and the connection has no thread of its own. One of the waiting threads waits on the descriptors
# for all of them, without the lock, and reads the frames that arrive. It wakes the threads that the frames are for.
# When it leaves, another thread takes its place.


_LONGEST_WAIT_S = 1.0
"""A waiting thread looks for itself after this time, even if no other thread has woken it."""


class SharedConnection(Connection):
    """A connection for threads. Any thread may call a method that takes the lock. ``pump`` needs the lock."""

    lock: "threading.RLock"

    def __init__(self, endpoint: str | None, **more: Any) -> None:
        super().__init__(endpoint, **more)
        self.lock = threading.RLock()
        self._waiters: dict[int, threading.Condition] = {}
        self._polling: threading.Condition | None = None
        self._poller = select.poll()
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._nudged = False

    def wait_welcome(self) -> None:
        """Wait until WELCOME has come. Raises ConnectionLost, or the error with which the supervisor refuses."""
        self.wait((), lambda: check_welcomed(self), None)

    def wait(self, states: Collection[Touched], done: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``done`` returns True. Return False if ``timeout`` seconds pass first.

        states  the requests and calls that ``done`` depends on. The end of the connection changes them, too

        Raises RuntimeError if another thread waits for one of them.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            with self.lock:
                waiter = self._enter(states)
                try:
                    while True:
                        self.pump()
                        if done():
                            return True
                        due = self.due()
                        pause = _LONGEST_WAIT_S if due is None else min(due, _LONGEST_WAIT_S)
                        if deadline is not None:
                            left = deadline - time.monotonic()
                            if left <= 0:
                                return False
                            pause = min(pause, left)
                        if self._polling is None:
                            self._poll(waiter, pause)
                        else:
                            waiter.wait(pause)
                finally:
                    self._exit(states)
        finally:
            self._settle()

    def check(self) -> None:
        super().check()
        # This thread could take the lock again, in the middle of the work that the lock guards.
        if _is_held_here(self.lock):
            raise RuntimeError(
                "this client was used by a signal handler, or a finalizer, that interrupted its own work: "
                "there a stream may be cancelled, and nothing else be done"
            )

    def cancel(self, state: StreamState) -> None:
        self.check_process()
        # Never block: a signal handler may call this, and the interrupted code may hold the lock.
        self._noted.append((self.session.cancel, state))
        self._settle()

    def close(self) -> None:
        if self.closed or os.getpid() != self._pid:
            return
        self.check()
        super().close()
        with self.lock:
            if self._wakeup >= 0:
                os.close(self._wakeup)
                self._wakeup = -1

    def __del__(self) -> None:
        if getattr(self, "_wakeup", -1) >= 0:  # nobody closed the client
            os.close(self._wakeup)

    def _enter(self, states: Collection[Touched]) -> threading.Condition:
        if any(state.id in self._waiters for state in states):
            raise RuntimeError("another thread is reading this stream: one thread at a time")
        waiter = threading.Condition(self.lock)
        for state in states:
            self._waiters[state.id] = waiter
        return waiter

    def _exit(self, states: Collection[Touched]) -> None:
        for state in states:
            del self._waiters[state.id]
        if self._polling is None and self._waiters:
            next(iter(self._waiters.values())).notify()

    def _poll(self, waiter: threading.Condition, seconds: float) -> None:
        """Wait on the descriptors, and release the lock meanwhile."""
        if self._nudged:
            # Clear the nudge before the poll. After the poll, another thread may poll, and a nudge may be for that one.
            self._nudged = False
            try:
                os.eventfd_read(self._wakeup)
            except BlockingIOError:  # an interrupt came between
                pass
        poller = self._poller
        self._polling = waiter
        try:
            # An interrupt may come right after any call. Within this block, the lock is taken again in any case. No
            # thread may wait for a poll that is over. So ``_polling`` is reset before the lock is taken again.
            self.lock.release()
            # A thread that dropped a stream while this one held the lock relies on this one to cancel it.
            if not self._noted:
                # Round up: a poll of 0 ms for the last fraction would spin.
                poller.poll(math.ceil(seconds * 1000))
        finally:
            self._polling = None
            self.lock.acquire()

    def _nudge(self) -> None:
        """End the poll of another thread, if there is one."""
        if self._polling is not None:
            self._nudged = True
            os.eventfd_write(self._wakeup, 1)

    def _watch(self, transport: Transport) -> None:
        # Make a new poll object: a thread may be waiting with the old one.
        self._poller = select.poll()
        for descriptor in (*transport.descriptors, self._wakeup):
            self._poller.register(descriptor, select.POLLIN)

    def _unwatch(self) -> None:
        self._poller = select.poll()
        self._poller.register(self._wakeup, select.POLLIN)

    def _changed(self, touched: list[Touched]) -> None:
        for state in touched:
            waiter = self._waiters.get(state.id)
            if waiter is None:
                continue
            if waiter is self._polling:
                self._nudge()
            else:
                waiter.notify()

    def _settle(self) -> None:
        # The thread that holds the lock calls this method after releasing it, or looks at ``_noted`` in ``_poll``. So
        # that thread sees what was noted just before. A finalizer runs at any time, also in a thread that holds the
        # lock.
        while self._noted and self._is_free() and self.lock.acquire(blocking=False):
            try:
                if not self.closed:
                    self._send_noted()
                    self._nudge_for_input()
            finally:
                self.lock.release()

    def _is_free(self) -> bool:
        return not (self.closed or _is_held_here(self.lock)) and os.getpid() == self._pid

    def _nudge_for_input(self) -> None:
        """Wake the polling thread if there is input. Sending may have consumed the edge that would have woken it."""
        if (
            self._polling is not None
            and self.transport is not None
            and not self.transport.left
            and self.transport.has_input
        ):
            self._nudge()


def _is_held_here(lock: "threading.RLock") -> bool:
    """Return whether this thread holds a lock. threading.Condition uses the same private method."""
    held: bool = lock._is_owned()  # type: ignore[attr-defined]
    return held


# The answers that ``Client`` returns while they are generated: one, or several.


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Stream(StreamBase):
    """The answer to one request, while it is generated. Iterate over it for ``Delta`` objects.

    Leaving the loop cancels the request: by break, by an exception, by ``close()``, or when the stream is garbage
    collected. ``cancel()`` asks for the end and lets you read up to it; ``finish_reason`` is then "cancelled".

    If the request ends with an error, the iteration raises it once: WireError with the code, or ConnectionLost. It
    raises TimeoutError after the ``timeout`` of ``generate``. One thread at a time reads a stream. Any thread may
    cancel it.

    A member is None or empty until its value has come: ``format`` to ``max_tokens`` with the first event, and
    ``finish_reason`` to ``timings`` with the end.
    """

    _connection: SharedConnection

    def __iter__(self) -> Iterator[Delta]:
        # A separate iterator is deleted when the loop ends, even if a name still holds the stream.
        return _Loop(self)

    def __next__(self) -> Delta:
        self._connection.check()
        while True:
            delta = self._now()
            if delta is not None:
                return delta
            if self._over:
                raise StopIteration
            if not self._wait_any([self], self._timeout):
                self.close()
                raise TimeoutError(f"no event of request {self.request_id} within {self._timeout} s: it was cancelled")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def complete(self) -> Completion:
        """Read to the end, and return the whole answer."""
        for _ in self:
            pass
        return self._completion()

    def _wait_any(self, streams: "Sequence[Stream]", timeout: float | None) -> bool:
        """Wait until anything arrives for one of these streams. Return False after ``timeout`` seconds without that."""
        states = [stream._state for stream in streams]
        arrivals = sum(state.arrivals for state in states)

        def done() -> bool:
            # ACCEPTED brings nothing to read, but shows that the supervisor works on the request.
            return any(s._stirred for s in streams) or sum(state.arrivals for state in states) != arrivals

        return self._connection.wait(states, done, timeout)


class _Loop(Generic[T]):
    """The iterator of a ``for`` loop over a Stream or Choices. It is deleted when the loop ends."""

    __slots__ = ("_read",)

    def __init__(self, read: "_Read[T]") -> None:
        self._read = read

    def __iter__(self) -> "_Loop[T]":
        return self

    def __next__(self) -> T:
        return next(self._read)

    def __del__(self) -> None:
        self._read._abandon()


class _Read(Protocol[T_co]):
    def __next__(self) -> T_co: ...
    def _abandon(self) -> None: ...


class Choices(ChoicesBase[Stream]):
    """The answers of ``Client.choices``. Iterate for (index, ``Delta``) pairs in the order in which they arrive.

    Leaving the loop cancels every unfinished request. If one request ends with an error, the others are cancelled, and
    the iteration raises the WireError with its ``index``. Read ``streams`` one by one if one failure should not end
    the others.
    """

    def __iter__(self) -> Iterator[tuple[int, Delta]]:
        return _Loop(self)

    def __next__(self) -> tuple[int, Delta]:
        while True:
            if (came := self._now()) is not None:
                return came
            waiting = self._unfinished
            if not waiting:
                raise StopIteration
            if not waiting[0]._wait_any(waiting, self._timeout):
                raise self._timed_out()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def complete(self) -> list[Completion]:
        """Read all answers to their ends, and return them by index."""
        for _ in self:
            pass
        return [stream._completion() for stream in self.streams]


__all__ = ["Choices", "Client", "Completion", "Delta", "Embeddings", "Progress", "Stream", "TokenLogprob"]


class Client(ClientBase[SharedConnection]):
    """A connection to the supervisor, from blocking code.

    Threads of one process may share a client. Only one thread at a time may read a stream. After a fork, make a client
    in each process.

    When the connection ends, every unfinished request raises ConnectionLost once. The next request or call connects
    anew. No request is sent twice. No wait lasts for ever: the client notices a stopped supervisor within 5 s (12 s
    over TCP), and a supervisor that hangs within ``silence``.

    endpoint         ZeroMQ endpoint. Unset: the front socket in ``runtime_dir``
    runtime_dir      the supervisor's runtime directory. Unset: $MODELCTL_RUNTIME_DIR, else $XDG_RUNTIME_DIR/modelctl,
                     else /tmp/modelctl-UID
    timeout          seconds to wait for the supervisor's greeting, and for the replies to ``models`` and ``status``
    admin            connect to the admin socket, which takes ``call`` only
    key              for an endpoint over TCP (``tcp://HOST:PORT``): a ClientKey, or the path of the file that
                     ``modelctl keys new`` wrote
    reconnect        connect anew for the next request or call after a lost connection. False: they raise ConnectionLost
    connect_timeout  seconds to connect anew. The client tries again after pauses that grow from 0.05 s to 2 s
    silence          seconds without any message, while the client waits for one, after which the connection counts as
                     lost. The client sends a PING after a third of this time

    The constructor waits for the greeting. It raises ConnectionLost if nobody listens, if another user listens, or if
    nobody answers within ``timeout``; WireError if the supervisor refuses the client (unauthorized, bad_version,
    draining); and ValueError for a socket path that is too long or a key file that cannot be used.
    """

    _connection_class = SharedConnection

    def _start(self) -> None:
        self._reconnecting = threading.Lock()
        self._failed: tuple[float, str] | None = None
        self._connected = self._connect(patience=self.timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self,
        model: str | None,
        prompt: str | None = None,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Stream:
        """Send a request, without waiting, and return the stream of its answer.

        model        the name of a model, an alias, or a variant (``qwen:precise``). None: the ``default_model`` of
                     models.yaml
        on_progress  function that is called with a ``Progress`` until the first token. The thread that reads the stream
                     calls it, and its exceptions are raised there
        timeout      seconds without any event of this request, while the stream is read. Then the request is cancelled
                     and the stream raises TimeoutError. Unset: wait as long as the supervisor answers, because a model
                     may be loading
        options      the prompt, and every other option of a request

        Raises ConnectionLost if no connection could be made, and WireError: too_large, draining, or invalid_request for
        a value that cannot be sent. The stream raises every other error of the request, and names the field.
        """
        connection, (state,) = self._begin(model, [collect_options(prompt, options, progress=on_progress is not None)])
        return Stream(connection, state, timeout, on_progress)

    def choices(
        self,
        model: str | None,
        prompt: str | None = None,
        *,
        n: int,
        on_progress: Callable[[int, Progress], None] | None = None,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Choices:
        """Send ``n`` requests with one prompt, and return their answers. The requests share the prompt's cache.

        n            number of answers, 1 to 1024
        on_progress  function that is called with (index, ``Progress``)
        timeout      seconds without any event of any of the requests, after which all are cancelled
        options      the options of ``generate``. With a ``seed``, request i has the seed ``seed + i``
        """
        requests = choice_requests(collect_options(prompt, options, progress=on_progress is not None), n)
        connection, states = self._begin(model, requests)
        callbacks = [on_progress and partial(on_progress, i) for i in range(n)]
        streams = (Stream(connection, state, timeout, tell) for state, tell in zip(states, callbacks, strict=True))
        return Choices(tuple(streams), timeout)

    def complete(
        self,
        model: str | None,
        prompt: str | None = None,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Return the whole answer. Takes the options of ``generate``, and raises the errors of its stream."""
        stream = self.generate(model, prompt, on_progress=on_progress, timeout=timeout, **options)
        return stream.complete()

    def embed(
        self,
        model: str | None,
        texts: Iterable[str | Iterable[int]],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate: bool | None = None,
        timeout: float | None = None,
        **route: Unpack[RouteOptions],
    ) -> Embeddings:
        """Return the vectors of texts.

        model        as for ``generate``: a model with ``engine: embedding``
        texts        texts, or lists of token ids, which are used as they are
        dimensions   keep this many numbers of each vector
        prompt_name  name of the model's prompt that stands before each text, such as "query"; empty for none
        truncate     cut texts that are longer than the model takes. Unset: such a request is refused
        timeout      seconds without any event, after which the request is cancelled and TimeoutError is raised
        route        the options of ``generate`` that say how the request is served

        Raises the errors of ``generate`` and of its stream.
        """
        given = embed_options(texts, route, dimensions=dimensions, prompt_name=prompt_name, truncate=truncate)
        return self._vectors(model, given, Embed, timeout)

    def rerank(
        self,
        model: str | None,
        query: str,
        documents: Iterable[str],
        *,
        instruction: str | None = None,
        truncate: bool | None = None,
        timeout: float | None = None,
        **route: Unpack[RouteOptions],
    ) -> Embeddings:
        """Return how well documents answer a query: a score for each, in their order.

        instruction  what the model is asked to look for, for models such as Qwen3-Reranker
        truncate     cut documents that do not fit the model together with the query

        The other parameters and the errors are those of ``embed``.
        """
        given = rerank_options(query, documents, route, instruction=instruction, truncate=truncate)
        return self._vectors(model, given, Rerank, timeout)

    def tokenize(
        self,
        model: str | None,
        prompt: str | None = None,
        *,
        messages: Sequence[dict[str, Any]] | None = None,
        reply_timeout: float | None = None,
        **template: Any,
    ) -> tuple[int, ...]:
        """Return the token ids of a prompt, or of a conversation as the model's chat template renders it.

        template       ``tools`` and ``template_kwargs`` for the template
        reply_timeout  seconds to wait for the reply. Unset: wait as long as the supervisor answers

        Raises the errors of ``call``.
        """
        params = tokenize_params(model, template | {"prompt": prompt, "messages": messages})
        return token_ids_in(self._call("tokenize", params, reply_timeout))

    def detokenize(
        self, model: str | None, token_ids: Iterable[int] | bytes, *, reply_timeout: float | None = None
    ) -> str:
        """Return the text of token ids, or of bytes (u32, little endian). Raises the errors of ``call``."""
        params = {"model": model or "", "token_ids": pack_token_ids(token_ids)}
        return text_in(self._call("detokenize", params, reply_timeout))

    def call(self, verb: str, /, *, reply_timeout: float | None = None, **params: Any) -> dict[str, Any]:
        """Send a question or an order to the supervisor, and return its reply.

        verb           a verb of the message CALL, such as "status" or "start"
        reply_timeout  seconds to wait for the reply. Unset: wait as long as the supervisor answers
        params         the parameters of the verb. A gateway adds ``on_behalf_of``: the id of the HTTP key for which it
                       asks

        Raises WireError with the supervisor's error code, ConnectionLost, or TimeoutError.
        """
        return self._call(verb, params, reply_timeout)

    # --- verbs: `python -m tools.docs` writes these methods into async_client.py, too

    def models(self) -> dict[str, Any]:
        """Return the models and their states: the reply to the verb "models"."""
        return self._ask("models")

    def status(self, model: str | None = None) -> dict[str, Any]:
        """Return the supervisor's state and that of one model or of all: the reply to the verb "status"."""
        return self._ask("status", model=model)

    def requests(self, limit: int | None = None) -> dict[str, Any]:
        """Return the unfinished requests, the oldest first: the reply to the verb "requests".

        limit  the greatest number of requests, from 1 to 500; 100 by default

        A key without the rights status and admin sees its own requests only.
        """
        return self._ask("requests", limit=limit)

    def ended_requests(self, after: int | None = None, limit: int | None = None) -> dict[str, Any]:
        """Return the last requests that have ended, the oldest first: the reply to the verb "ended_requests".

        after  the ``last`` of an earlier reply: return only requests that have ended since then
        limit  the greatest number of requests, from 1 to 1000; 100 by default. Older ones are left out

        A key without the rights status and admin sees its own requests only. If ``session`` differs from that of the
        earlier reply, the supervisor was started again: ask without ``after``.
        """
        return self._ask("ended_requests", after=after, limit=limit)

    def story(self, request: str) -> dict[str, Any]:
        """Return what became of a request, or of the requests of one HTTP request: the reply to the verb "story".

        request  the ``id`` of a request, as ``requests()`` names it, or one of its ``trace_ids``

        Raises RequestError for a request that is not known, or that this client may not see.
        """
        return self._ask("story", id=request)

    def cancel_request(self, request: str) -> None:
        """Cancel a request of any client: the verb "cancel_request". To end an own stream, use its ``cancel()``.

        request  the ``id`` of a request, as ``requests()`` names it, or one of its ``trace_ids``

        Locally this takes a client with ``admin=True``. Raises the errors of ``call``.
        """
        self._ask("cancel_request", id=request)

    def events(
        self,
        after: int | None = None,
        limit: int | None = None,
        model: str | None = None,
    ) -> dict[str, Any]:
        """Return events such as changes of state, deaths and reloads: the reply to the verb "events".

        after  the ``last`` of an earlier reply: return the events behind it. Unset: return the newest events
        limit  the greatest number of events, from 1 to 512; 100 by default
        model  return only the events of this model

        If ``session`` differs from that of the earlier reply, the supervisor was started again: ask without ``after``.
        """
        return self._ask("events", after=after, limit=limit, model=model)

    def usage(self, key: str | None = None, model: str | None = None, since: str | None = None) -> dict[str, Any]:
        """Return requests and tokens by key, model and day: the reply to the verb "usage".

        key    the name of a key; empty for requests without a key. Unset: all keys that this client may see
        model  the name of a model. Unset: all models
        since  the first day, such as "2026-01-31". Unset: all days that are kept

        A key without the rights status and admin sees its own usage only.
        """
        return self._ask("usage", key=key, model=model, since=since)

    def log_level(self, model: str | None = None, level: str | None = None) -> dict[str, str]:
        """Return the least levels of the lines in logs, by the name of the process: the verb "log_level".

        model  a model, "supervisor" or "gateway". Unset: all of them
        level  the new level: debug, info, warning or error. Unset: nothing is changed

        Locally this takes a client with ``admin=True``. Raises the errors of ``call``.
        """
        reply = self._ask("log_level", model=model, level=level)
        levels: dict[str, str] = reply["levels"]
        return levels

    def logs(
        self,
        model: str | None = None,
        lines: int | None = None,
        after: str | None = None,
        since: float | None = None,
    ) -> dict[str, Any]:
        """Return the last lines of a log, or the lines after a position: the reply to the verb "logs".

        model  a model, or one of its workers (``letters:2``), or "gateway". Unset: the supervisor's own log
        lines  the greatest number of lines, from 1 to 1000; 200 by default
        after  the ``position`` of an earlier reply: return the lines behind it
        since  seconds since 1970, in place of ``after``: return the lines from that time on, the oldest first
        """
        return self._ask("logs", model=model, lines=lines, after=after, since=since)

    # --- end of the verbs

    def close(self) -> None:
        """End the connection, and with it every unfinished request. A second call does nothing."""
        self._closed = True
        self._connection.close()

    def _vectors(
        self, model: str | None, given: dict[str, Any], kind: type[Generate], timeout: float | None
    ) -> Embeddings:
        connection, (state,) = self._begin(model, [given], kind)
        stream = Stream(connection, state, timeout, None)
        for _ in stream:
            pass
        return stream._embeddings()

    def _ask(self, verb: str, **params: Any) -> dict[str, Any]:
        """Return the reply to a verb. A parameter that is None is left out."""
        return self._call(verb, given(**params), USAGE_S if verb == "usage" else self.timeout)

    def _call(self, verb: str, params: dict[str, Any], reply_timeout: float | None) -> dict[str, Any]:
        connection = self._usable()
        state = connection.ask(verb, params)
        try:
            if not connection.wait([state], lambda: state.ended, reply_timeout):
                raise TimeoutError(f"no answer to {verb} within {reply_timeout} s")
        finally:
            connection.forget(state)
        if state.error is not None:
            try:
                raise state.error
            finally:
                del state  # it holds the error, whose traceback holds this frame and its parameters
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
        """Return the connection, or a new one if it was lost."""
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
                raise ConnectionLost(self._failed[1])  # another thread has just tried for as long
            try:
                new = self._connect(patience=self._connect_timeout, redial=True)
            except ConnectionLost as e:
                self._failed = time.monotonic(), e.message
                raise
            self._connected = new
            connection.close()
            if self._closed:  # by another thread, meanwhile
                new.close()
        return new
