"""The client's end of the protocol, without any I/O. Received frames go in, and frames to send come out.

``ClientSession`` holds the unfinished requests and calls of one connection. One thread at a time may use it: the
connection's lock ensures that. The two clients differ only in how they wait for the next frame.
"""

from collections import deque
from typing import Any

from protocol import limits
from protocol.client.answers import (
    CallState,
    Delta,
    StreamState,
    Touched,
    read_format,
    read_logprobs,
    read_prompt_logprobs,
    read_report,
    read_vectors,
)
from protocol.client.request_options import pack_fields
from protocol.codec import check_size, decode, encode, pack_body, split_events, unpack_body, unpack_event
from protocol.errors import ConnectionLost, ErrorCode, FrameError, WireError
from protocol.messages import (
    SUPERVISOR_TO_CLIENT,
    TERMINAL,
    Accepted,
    Call,
    Cancel,
    Credit,
    Error,
    EventEntry,
    EventFlag,
    Events,
    Generate,
    GoAway,
    Hello,
    Message,
    Ping,
    Pong,
    Reply,
    Report,
    Welcome,
)


class ClientSession:
    """The state of one connection: its greeting, its unfinished requests and calls, and the frames to send.

    hello    the first frame of the connection
    outbox   frames to send once WELCOME has come, in order
    welcome  the body of WELCOME. None until it comes
    goaway   why the supervisor takes no new requests. None while it takes them
    broken   why the connection has ended. None while it is usable
    ignored  number of frames and events that no request waits for: of newer kinds, or of requests that were given up
    """

    def __init__(self, library: str) -> None:
        self.hello = encode(Hello(pack_body({"library": library})))
        self.outbox: deque[bytes] = deque()
        self.welcome: dict[str, Any] | None = None
        self.goaway: str | None = None
        self.broken: WireError | None = None
        self.ignored = 0
        self._window = limits.STREAM_WINDOW
        # Requests and calls share one sequence. So no ERROR that answers a broken CALL has the number of a request.
        self._last_id = 0
        self._streams: dict[int, StreamState] = {}
        self._calls: dict[int, CallState] = {}

    # ---- what the program asks for

    def generate(
        self, model: str, body: dict[str, Any], route: dict[str, Any] | None = None, kind: type[Generate] = Generate
    ) -> StreamState:
        """Queue GENERATE, EMBED or RERANK. Raises ``broken``, DRAINING after GOAWAY, TOO_LARGE, or INVALID_REQUEST."""
        self._check_usable()
        if self.goaway is not None:
            raise WireError(ErrorCode.DRAINING, f"the supervisor takes no new requests: {self.goaway}")
        message = kind(self._last_id + 1, model, route or {}, pack_fields(body))
        self._send_checked(message)
        state = self._streams[message.request] = StreamState(message.request)
        return state

    def call(self, verb: str, params: dict[str, Any]) -> CallState:
        """Queue CALL. Raises ``broken``, TOO_LARGE, or INVALID_REQUEST."""
        self._check_usable()
        message = Call(self._last_id + 1, verb, pack_fields(params))
        self._send_checked(message)
        state = self._calls[message.call] = CallState(message.call)
        return state

    def take(self, state: StreamState) -> Delta | None:
        """Return the next delta in order. None if there is none now. Raises the request's error, once."""
        if state.deltas:
            delta = state.deltas.popleft()
            state.text.append(delta.text)
            state.token_ids.extend(delta.token_ids)
            state.logprobs.extend(delta.logprobs)
            if delta.prompt is not None:
                state.prompt.append(delta.prompt)
            if delta.vectors is not None:
                state.vectors.append(delta.vectors)
            self._consumed(state, 1)
            return delta
        if state.ended:
            self._streams.pop(state.id, None)
            error, state.error = state.error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its traceback holds this frame, and the frames with the request
        return None

    def cancel(self, state: StreamState) -> None:
        """Queue CANCEL, unless one was sent or the request has ended. The terminal event still comes."""
        if not (state.cancel_sent or state.ended or self.broken):
            state.cancel_sent = True
            self.outbox.append(encode(Cancel(state.id)))

    def abandon(self, state: StreamState) -> None:
        """Cancel a request whose stream nobody will read any more, and drop what still arrives for it."""
        if state.abandoned:
            return
        state.abandoned = True
        self._consumed(state, len(state.deltas))
        state.deltas.clear()
        self.cancel(state)
        if state.ended:
            self._streams.pop(state.id, None)

    def forget_call(self, state: CallState) -> None:
        """Drop the REPLY to a call when it comes, because nobody waits for it any more."""
        self._calls.pop(state.id, None)

    def ping(self) -> None:
        """Queue PING. Any message that comes back is a sign of life."""
        self.outbox.append(encode(Ping(0)))

    @property
    def unfinished(self) -> bool:
        """True if a request or a call waits for a message."""
        return bool(self._calls) or any(not state.ended for state in self._streams.values())

    # ---- what the connection brings

    def receive(self, frame: bytes) -> list[Touched]:
        """Take in one frame, and return the requests and calls that it changed. Never raises, whatever the frame is."""
        try:
            message = decode(frame, SUPERVISOR_TO_CLIENT)
            return self._on_message(message)
        except FrameError as e:
            if e.code is ErrorCode.UNSUPPORTED:
                self.ignored += 1
                return []
            # The frame may have held a terminal event. A request that still waited for it would wait for ever.
            return self.lose(f"the supervisor sent a frame that this client cannot read ({e})")

    def lose(self, reason: str) -> list[Touched]:
        """End every unfinished request and call with one ConnectionLost. A second call does nothing."""
        return self._break(ConnectionLost(reason))

    def reject(self, reason: str) -> list[Touched]:
        """End every unfinished request and call with UNAUTHORIZED, because the client does not have the right key."""
        return self._break(WireError(ErrorCode.UNAUTHORIZED, reason))

    def _on_message(self, message: Message) -> list[Touched]:
        if isinstance(message, Events):
            return [s for entry, event in split_events(message) if (s := self._on_event(entry, event)) is not None]
        if isinstance(message, Reply):
            return self._on_reply(message)
        if isinstance(message, Accepted):
            return self._on_accepted(message)
        if isinstance(message, Error):
            return self._on_error(message)
        if isinstance(message, Report):
            return self._on_report(message)
        if isinstance(message, Ping):
            self.outbox.append(encode(Pong(message.nonce)))
        elif isinstance(message, Welcome):
            self.welcome = unpack_body(message.body)
            window = self.welcome.get("window")
            if type(window) is int and window > 0:
                self._window = window
        elif isinstance(message, GoAway):
            self.goaway = str(unpack_body(message.body).get("reason", "it is shutting down"))
        return []

    def _on_event(self, entry: EventEntry, event: bytes) -> StreamState | None:
        state = self._streams.get(entry.request)
        if state is None:
            self.ignored += 1
            return None
        state.arrivals += 1
        if state.ended:
            return self._fault(state, f"event {entry.seq} followed the terminal event")
        if entry.seq != state.next_seq:
            return self._fault(state, f"event {entry.seq} came where {state.next_seq} was due")
        state.next_seq += 1
        try:
            self._apply(state, entry, event)
        except FrameError as e:
            return self._fault(state, f"event {entry.seq} cannot be read ({e.message})")
        if state.ended and state.abandoned:
            del self._streams[state.id]
        return state

    def _apply(self, state: StreamState, entry: EventEntry, event: bytes) -> None:
        ids, fields = unpack_event(entry, event)
        text = fields.get("text", "")
        if type(text) is not str:
            raise FrameError(ErrorCode.BAD_FRAME, "its text is not a string")
        terminal = entry.flags & TERMINAL
        if terminal == EventFlag.ERROR:
            state.error = _error_in(fields)
        elif terminal == EventFlag.FINISHED:
            reason, usage, timings = fields.get("finish_reason"), fields.get("usage", {}), fields.get("timings", {})
            if type(reason) is not str or type(usage) is not dict or type(timings) is not dict:
                raise FrameError(ErrorCode.BAD_FRAME, "finish_reason, usage or timings has the wrong type")
            if type(stop := fields.get("stop_string")) not in (str, type(None)):
                raise FrameError(ErrorCode.BAD_FRAME, "its stop_string is not a string")
            state.finish_reason, state.usage, state.timings, state.stop_string = reason, usage, timings, stop
        elif terminal:
            raise FrameError(ErrorCode.BAD_FRAME, "it is flagged both FINISHED and ERROR")
        if type(fields.get("prompt_tokens")) is int:
            state.prompt_tokens = fields["prompt_tokens"]
        if isinstance(left_out := fields.get("left_out"), list):
            state.left_out = tuple(str(name) for name in left_out)
        if isinstance(forced := fields.get("forced"), dict):
            state.forced = {str(name): value for name, value in forced.items()}
        if type(fields.get("max_tokens")) is int:
            state.max_tokens = fields["max_tokens"]
        if "format" in fields:
            state.format = read_format(fields["format"])
        prompt, vectors = fields.get("prompt_logprobs"), fields.get("vectors")
        is_kept = bool(ids or text) or prompt is not None or vectors is not None
        if kept := is_kept and not state.abandoned:
            entries = fields.get("logprobs")
            if vectors is not None:
                state.deltas.append(Delta(text, ids, vectors=read_vectors(vectors)))
            elif prompt is not None:
                state.deltas.append(Delta(text, ids, prompt=read_prompt_logprobs(prompt)))
            else:
                state.deltas.append(Delta(text, ids, read_logprobs(ids, entries)) if entries else Delta(text, ids))
        # Set this last. A thread that reads checks without the lock whether the request has ended and all was taken.
        state.ended = bool(terminal)
        if not kept:
            self._consumed(state, 1)

    def _on_accepted(self, message: Accepted) -> list[Touched]:
        if (state := self._streams.get(message.request)) is None:
            return []
        state.accepted = unpack_body(message.body)
        state.arrivals += 1
        return [state]

    def _on_report(self, message: Report) -> list[Touched]:
        state, report = self._streams.get(message.request), read_report(unpack_body(message.body))
        if state is None or state.ended or report is None:
            self.ignored += 1
            return []
        # Keep the newest report only. A slow reader does not need the older ones.
        state.report = report
        state.arrivals += 1
        return [state]

    def _on_error(self, message: Error) -> list[Touched]:
        error = WireError.from_wire(unpack_body(message.body))
        if message.request == 0:
            # This ERROR may answer any frame of this client. So the client cannot rely on any unfinished request.
            return self._break(error)
        state: Touched | None = self._streams.get(message.request) or self._calls.pop(message.request, None)
        if state is None:
            self.ignored += 1
            return []
        if state.ended and isinstance(state, StreamState):
            return [self._fault(state, "an ERROR followed the terminal event")]
        state.error, state.ended = error, True
        if isinstance(state, StreamState) and state.abandoned:
            del self._streams[state.id]
        return [state]

    def _on_reply(self, message: Reply) -> list[Touched]:
        if (state := self._calls.pop(message.call, None)) is None:
            return []
        try:
            body = unpack_body(message.body)
            if "error" in body:
                state.error = _error_in(body)
            elif type(result := body.get("result")) is dict:
                state.result = result
            else:
                raise FrameError(ErrorCode.BAD_FRAME, "body: neither a result nor an error")
        except FrameError as e:
            state.error = WireError(ErrorCode.INTERNAL, f"the reply cannot be read ({e.message})")
        state.ended = True
        return [state]

    # ---- bookkeeping

    def _consumed(self, state: StreamState, events: int) -> None:
        state.owed += events
        if state.owed >= max(1, self._window // 2) and not (state.ended or self.broken):
            self.outbox.append(encode(Credit(state.id, state.owed)))
            state.owed = 0

    def _fault(self, state: StreamState, what: str) -> StreamState:
        """End a stream that broke the protocol, with INTERNAL. Events that follow are ignored."""
        self.cancel(state)
        state.error = WireError(ErrorCode.INTERNAL, f"the supervisor broke the protocol: {what}")
        state.finish_reason, state.ended = None, True
        self._streams.pop(state.id, None)
        return state

    def _break(self, error: WireError) -> list[Touched]:
        if self.broken is not None:
            return []
        self.broken = error
        self.outbox.clear()
        unfinished: list[Touched] = [*self._streams.values(), *self._calls.values()]
        unfinished = [state for state in unfinished if not state.ended]
        self._streams.clear()
        self._calls.clear()
        for state in unfinished:
            # Each gets an exception object of its own, because a traceback is part of the object.
            state.error, state.ended = error.again(), True
        return unfinished

    def _check_usable(self) -> None:
        if self.broken is not None:
            raise self.broken.again()

    def _send_checked(self, message: Generate | Call) -> None:
        frame = encode(message)
        check_size(frame, message.kind)
        self._last_id += 1
        self.outbox.append(frame)


def _error_in(fields: dict[str, Any]) -> WireError:
    error = fields.get("error")
    if type(error) is not dict:
        raise FrameError(ErrorCode.BAD_FRAME, "its error is not a map")
    return WireError.from_wire(error)
