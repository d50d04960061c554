"""Base classes of clients, streams and choices: what the blocking client and that for asyncio have in common.

The modules ``sync_client`` and ``async_client`` beside this one add how a program waits for the next event.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from protocol.client.answers import Completion, Delta, Embeddings, Progress, PromptLogprobs, StreamState, TokenLogprob
from protocol.client.connection import CANNOT_CONNECT, Connection, check_can_generate
from protocol.client.request_options import generate_request
from protocol.client.transport import DEFAULT_SILENCE_S, ClientKey
from protocol.errors import ErrorCode, WireError
from protocol.messages import FinishReason, Generate

OnProgress = Callable[[Progress], None]


class StreamBase:
    """The part of one request's answer that was read."""

    def __init__(
        self, connection: Connection, state: StreamState, timeout: float | None, on_progress: OnProgress | None
    ) -> None:
        self._connection = connection
        self._state = state
        self._timeout = timeout
        self._on_progress = on_progress
        self._left = False
        self._cut = False
        """True if the reader left before it had read the end."""

    @property
    def request_id(self) -> int:
        """The number of the request on its connection."""
        return self._state.id

    @property
    def accepted(self) -> dict[str, Any] | None:
        """The map in ACCEPTED: the model, the place in the queue. None until it has arrived."""
        return self._state.accepted

    @property
    def text(self) -> str:
        """The text read so far. ``Client.complete`` returns a whole answer."""
        return "".join(self._state.text)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of the tokens read so far."""
        return tuple(self._state.token_ids)

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the tokens read so far."""
        return tuple(self._state.logprobs)

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the prompt's tokens read so far, from token ``prompt_logprobs_from`` on. The first
        token of a prompt has none. They are unpacked at each call."""
        return tuple(token for piece in self._state.prompt for token in piece.tokens())

    @property
    def prompt(self) -> tuple[PromptLogprobs, ...]:
        """The log-probabilities of the prompt's tokens read so far, as they came."""
        return tuple(self._state.prompt)

    @property
    def format(self) -> dict[str, Any]:
        """How the model writes reasoning and tool calls, if the request asked ``with_format``: the map
        ``AnswerFormat`` of the wire protocol."""
        return self._state.format

    @property
    def prompt_tokens(self) -> int | None:
        """The tokens of the prompt, if the request asked ``with_format``."""
        return self._state.prompt_tokens

    @property
    def left_out(self) -> tuple[str, ...]:
        """The options that the worker did without, as the request allowed it (``budget_if_reasoning``)."""
        return self._state.left_out

    @property
    def forced(self) -> dict[str, float | None]:
        """The options that the model's ``forced`` values have replaced, with the value that counts, or None for one
        that is no number and no switch."""
        return self._state.forced

    @property
    def max_tokens(self) -> int | None:
        """The most tokens that the answer can have, if ``cut_to_context`` has cut the request's ``max_tokens``."""
        return self._state.max_tokens

    @property
    def finish_reason(self) -> str | None:
        """The reason why the answer ended, see ``Completion``. None after an error, "cancelled" after a reader has left
        the stream before its end."""
        if self._cut:
            return FinishReason.CANCELLED
        return None if self._state.deltas else self._state.finish_reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer."""
        return None if self._state.deltas else self._state.stop_string

    @property
    def usage(self) -> dict[str, Any]:
        """Counts of tokens, like ``Completion.usage``."""
        return {} if self._state.deltas else self._state.usage

    @property
    def timings(self) -> dict[str, Any]:
        """Measured times, like ``Completion.timings``."""
        return {} if self._state.deltas else self._state.timings

    def cancel(self) -> None:
        """Ask the supervisor to end the request. The stream then brings its end as usual.

        If the request has ended, this does nothing. With ``Client``, a signal handler may call this method.
        """
        self._connection.cancel(self._state)

    def close(self) -> None:
        """Cancel the request, unless it has ended, and drop what was not read. A second call does nothing."""
        self._connection.check()
        self._leave()
        if not self._state.abandoned:
            self._connection.drop(self._state)

    def __del__(self) -> None:
        # the constructor may have failed
        if hasattr(self, "_left"):
            self._abandon()

    def _abandon(self) -> None:
        self._leave()
        self._connection.abandon(self._state)

    def _leave(self) -> None:
        self._cut = self._cut or not self._over
        self._left = True

    def _now(self) -> Delta | None:
        """Return the next delta, if it has come. None if none has come yet, or if the stream is over.

        Raises the request's error, and what ``on_progress`` raises.
        """
        if self._left:
            return None
        report, self._state.report = self._state.report, None
        if report is not None and self._on_progress is not None:
            self._on_progress(report)
        return self._connection.take(self._state)

    def _embeddings(self) -> Embeddings:
        if self.finish_reason == FinishReason.CANCELLED:
            raise WireError(ErrorCode.INTERNAL, "the request was cancelled: send it again if you still need it")
        return Embeddings.of(self._state.vectors, self.usage)

    @property
    def _over(self) -> bool:
        """True if nothing more will come, and everything that came was taken."""
        return self._left or (self._state.ended and not self._state.deltas and self._state.error is None)

    @property
    def _stirred(self) -> bool:
        """True if ``_now`` has something to do."""
        state = self._state
        return self._left or state.ended or bool(state.deltas) or state.report is not None

    def _completion(self) -> Completion:
        return Completion(
            self.text,
            self.token_ids,
            self.finish_reason or "",
            self.usage,
            self.timings,
            self.logprobs,
            self.stop_string,
            self.prompt,
        )


_S = TypeVar("_S", bound=StreamBase)


class ChoicesBase(Generic[_S]):
    """Several answers to one prompt.

    streams    the stream of each answer
    tell_ends  whether an answer that ends without a delta gets an empty one, so that the reader hears of its end before
               the other answers end
    """

    def __init__(self, streams: tuple[_S, ...], timeout: float | None, *, tell_ends: bool = False) -> None:
        self.streams = streams
        self._timeout = timeout
        self._turn = 0
        self._untold = set(range(len(streams))) if tell_ends else set()
        """Indices of the answers whose ends the reader has to be told of."""

    def __len__(self) -> int:
        return len(self.streams)

    def cancel(self) -> None:
        """Ask the supervisor to end every unfinished request. The streams then bring their ends as usual."""
        for stream in self.streams:
            stream.cancel()

    def close(self) -> None:
        """Cancel every unfinished request, and drop what was not read. A second call does nothing."""
        self._untold.clear()
        for stream in self.streams:
            stream.close()

    def _abandon(self) -> None:
        for stream in self.streams:
            stream._abandon()

    def _now(self) -> tuple[int, Delta] | None:
        """Return (index, delta) of a stream that has a delta, each stream in turn. None if no stream has one now."""
        for ahead in range(len(self.streams)):
            index = (self._turn + ahead) % len(self.streams)
            stream = self.streams[index]
            try:
                delta = stream._now()
            except WireError as e:
                e.index = index
                self.close()
                raise
            if index in self._untold and stream._over:
                self._untold.discard(index)
                delta = delta or Delta("", ())
            if delta is not None:
                self._turn = index + 1
                return index, delta
        return None

    @property
    def _unfinished(self) -> list[_S]:
        return [stream for stream in self.streams if not stream._over]

    def _timed_out(self) -> TimeoutError:
        self.close()
        return TimeoutError(f"no event of any choice within {self._timeout} s: all were cancelled")


_C = TypeVar("_C", bound=Connection)


class ClientBase(Generic[_C]):
    """The parameters of a client, and its connection, which the client's class makes."""

    _connection_class: ClassVar[Callable[..., Any]]

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
        self._connected: _C | None = None
        self._new_connection: Callable[..., _C] = partial(
            self._connection_class, endpoint, runtime_dir=runtime_dir, admin=admin, key=key, silence=silence
        )
        try:
            self._start()
        except CANNOT_CONNECT as e:
            raise e.with_traceback(None) from None

    def _start(self) -> None:
        """Connect, if that need not be awaited."""

    @property
    def endpoint(self) -> str:
        """The ZeroMQ endpoint of the connection."""
        return self._connection.endpoint

    @property
    def server(self) -> dict[str, Any]:
        """The supervisor's last greeting (WELCOME): its version, the session, the window, ..."""
        return dict(self._connection.session.welcome or {})

    @property
    def _connection(self) -> _C:
        if self._connected is None:
            raise RuntimeError("not connected: use `async with AsyncClient() as client`, or await client.connect()")
        return self._connected

    def _usable(self) -> _C:
        """Return the connection, or a new one if it was lost."""
        raise NotImplementedError

    def _begin(
        self, model: str | None, wanted: Sequence[dict[str, Any]], kind: type[Generate] = Generate
    ) -> tuple[_C, list[StreamState]]:
        requests = [(model or "", *generate_request(each)) for each in wanted]
        connection = self._usable()
        check_can_generate(connection)
        return connection, connection.begin(requests, kind)
