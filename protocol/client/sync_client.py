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

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Self, Unpack

from protocol.client.answers import Completion, Delta, Progress, StreamState, TokenLogprob, text_in, token_ids_in
from protocol.client.client_key import ClientKey
from protocol.client.connection import CANNOT_CONNECT, check_can_generate
from protocol.client.liveness import DEFAULT_SILENCE_S
from protocol.client.request_builder import (
    USAGE_S,
    choice_requests,
    collect_options,
    generate_request,
    given,
    pack_token_ids,
    tokenize_params,
)
from protocol.client.request_options import RequestOptions
from protocol.client.shared_connection import SharedConnection
from protocol.client.stream_base import OnProgress
from protocol.client.sync_streams import Choices, Stream
from protocol.errors import ConnectionLost

__all__ = ["Choices", "Client", "Completion", "Delta", "Progress", "Stream", "TokenLogprob"]


class Client:
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
    reconnect        connect anew for the next request or call after the connection was lost. False: each later request
                     or call raises ConnectionLost
    connect_timeout  seconds to connect anew. The client tries again after pauses that grow from 0.05 s to 2 s
    silence          seconds without any message from the supervisor, while the client waits for one, after which the
                     connection counts as lost. The client sends a PING after a third of this time

    The constructor waits for the greeting. It raises ConnectionLost if nobody listens there, if another user listens
    there, or if nobody answers within ``timeout``. It raises WireError if the supervisor refuses the client
    (unauthorized, bad_version, draining), and ValueError for a socket path that is too long or a key file that cannot
    be used.
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
        self._failed: tuple[float, str] | None = None
        self._new_connection: Callable[..., SharedConnection] = lambda **how: SharedConnection(
            endpoint, runtime_dir=runtime_dir, admin=admin, key=key, silence=silence, **how
        )
        try:
            self._connection = self._connect(patience=timeout)
        except CANNOT_CONNECT as e:
            raise e.with_traceback(None) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """The ZeroMQ endpoint of the connection."""
        return self._connection.endpoint

    @property
    def server(self) -> dict[str, Any]:
        """The supervisor's last greeting (WELCOME): its version, the session, the window, ..."""
        return dict(self._connection.session.welcome or {})

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

    def models(self) -> dict[str, Any]:
        """Return the models and their states: the reply to the verb "models"."""
        return self.call("models", reply_timeout=self.timeout)

    def status(self, model: str | None = None) -> dict[str, Any]:
        """Return the supervisor's state and that of one model or of all: the reply to the verb "status"."""
        return self.call("status", reply_timeout=self.timeout, **given(model=model))

    def requests(self, limit: int | None = None) -> dict[str, Any]:
        """Return the unfinished requests, the oldest first: the reply to the verb "requests".

        limit  the greatest number of requests, from 1 to 500; 100 by default

        A key without the rights status and admin sees its own requests only.
        """
        return self.call("requests", reply_timeout=self.timeout, **given(limit=limit))

    def ended_requests(self, after: int | None = None, limit: int | None = None) -> dict[str, Any]:
        """Return the last requests that have ended, the oldest first: the reply to the verb "ended_requests".

        after  the ``last`` of an earlier reply: return only requests that have ended since then
        limit  the greatest number of requests, from 1 to 1000; 100 by default. Older ones are left out

        A key without the rights status and admin sees its own requests only. If ``session`` differs from that of the
        earlier reply, the supervisor was started again: ask without ``after``.
        """
        return self.call("ended_requests", reply_timeout=self.timeout, **given(after=after, limit=limit))

    def story(self, request: str) -> dict[str, Any]:
        """Return what became of a request, or of the requests of one HTTP request: the reply to the verb "story".

        request  the ``id`` of a request, as ``requests()`` names it, or one of its ``trace_ids``

        Raises RequestError for a request that is not known, or that this client may not see.
        """
        return self.call("story", reply_timeout=self.timeout, id=request)

    def cancel_request(self, request: str) -> None:
        """Cancel a request of any client: the verb "cancel_request". To end an own stream, use its ``cancel()``.

        request  the ``id`` of a request, as ``requests()`` names it, or one of its ``trace_ids``

        Locally this takes a client with ``admin=True``. Raises the errors of ``call``.
        """
        self.call("cancel_request", reply_timeout=self.timeout, id=request)

    def events(self, after: int | None = None, limit: int | None = None, model: str | None = None) -> dict[str, Any]:
        """Return events such as changes of state, deaths and reloads: the reply to the verb "events".

        after  the ``last`` of an earlier reply: return the events behind it. Unset: return the newest events
        limit  the greatest number of events, from 1 to 512; 100 by default
        model  return only the events of this model

        If ``session`` differs from that of the earlier reply, the supervisor was started again: ask without ``after``.
        """
        return self.call("events", reply_timeout=self.timeout, **given(after=after, limit=limit, model=model))

    def usage(self, key: str | None = None, model: str | None = None, since: str | None = None) -> dict[str, Any]:
        """Return requests and tokens by key, model and day: the reply to the verb "usage".

        key    the name of a key; empty for requests without a key. Unset: all keys that this client may see
        model  the name of a model. Unset: all models
        since  the first day, such as "2026-01-31". Unset: all days that are kept

        A key without the rights status and admin sees its own usage only.
        """
        params = given(key=key, model=model, since=since)
        return self.call("usage", reply_timeout=USAGE_S, **params)

    def log_level(self, model: str | None = None, level: str | None = None) -> dict[str, str]:
        """Return the least levels of the lines in logs, by the name of the process: the verb "log_level".

        model  a model, "supervisor" or "gateway". Unset: all of them
        level  the new level: debug, info, warning or error. Unset: nothing is changed

        Locally this takes a client with ``admin=True``. Raises the errors of ``call``.
        """
        reply = self.call("log_level", reply_timeout=self.timeout, **given(model=model, level=level))
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
        return self.call(
            "logs", reply_timeout=self.timeout, **given(model=model, lines=lines, after=after, since=since)
        )

    def close(self) -> None:
        """End the connection, and with it every unfinished request. A second call does nothing."""
        self._closed = True
        self._connection.close()

    def _begin(self, model: str | None, wanted: Sequence[dict[str, Any]]) -> tuple[SharedConnection, list[StreamState]]:
        requests = [(model or "", *generate_request(each)) for each in wanted]
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
            self._connection = new
            connection.close()
            if self._closed:  # by another thread, meanwhile
                new.close()
        return new
