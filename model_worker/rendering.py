"""Render conversations to text, in processes that may be killed: see ``template_child``.

This module starts no thread, and its calls do not block. A template that loops, or allocates without end, costs its own
request one second of processor time. The worker's steps go on meanwhile. One process is enough for templates that
behave. If a process works for longer than PATIENCE_S while other conversations wait, more processes are started.
Connections take turns, so a client whose conversations take long delays other clients little.

A process that was killed from outside, or that has stopped working, is not evidence against its conversation. The
conversation is rendered once more in another process. If that fails too, the request ends with ``helper_failed``, which
clients may retry.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from model_worker.conversations import Form
from model_worker.engine import ChatTemplate
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.process.helper_environment import helper_environment

RENDER_S = 1.0
"""Seconds of processor time for compiling and rendering a template. After that the process's own timer ends it."""
PROBES_S = 2.0
"""Seconds of processor time for all probes of a model's templates."""
LEASE_S = 10.0
"""Seconds of wall-clock time that a process may take for one conversation. A process that has neither answered nor used
up its processor time by then has stopped working, and is killed."""
START_S = 20.0
"""Seconds that a process may take to start. Enough for a busy machine."""
PATIENCE_S = 0.05
"""Seconds that other conversations wait for a busy process before another process is started."""
MOST_CHILDREN = 4
MOST_TRIES = 2
"""The most processes that one conversation is given to, if processes are killed or stop working."""
RETRY_MS = 1000
"""``retry_after_ms`` of a request whose process failed."""
_LONGEST_ANSWER = 64 << 20
_PROGRAM = str(Path(__file__).with_name("template_child.py"))
_ROOT = str(Path(__file__).resolve().parent.parent)
"""The directory that this package is imported from. In an editable install it need not be in ``sys.path``."""

Outcome = tuple[int, str | WireError]
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
"""Signals that end a process by its own fault, other than the signal of its timer."""


@dataclass(slots=True, eq=False)
class _Chat:
    """A conversation to render for ``key``. ``tries`` counts the processes that it was given to."""

    key: int
    channel: int
    conversation: dict[str, Any]
    tries: int = 0


class Renderer:
    """Renders conversations by a model's template, in processes that it starts when they are needed.

    template  the model's chat template
    limit     the largest size of a rendered text, in bytes
    forms     what the template can take: of the one for conversations without tools, and of the one for those with
              tools (see ``probe_template``). Without forms, the template gets each conversation as it is

    ``ask`` takes a conversation under a key. ``collect`` returns the results in the order in which they are done. A
    result is the text, or RequestError (field "messages"), or WireError HELPER_FAILED if the processes were killed or
    stopped working, or WireError INTERNAL if the process crashed.
    """

    def __init__(self, template: ChatTemplate, limit: int, forms: Sequence[Form] = ()) -> None:
        self._sources = template.source, template.tool_source or template.source
        self._forms: list[dict[str, Any] | None] = [form.to_wire() for form in forms] or [None, None]
        self._fixed = {
            "special_tokens": dict(template.special_tokens),
            "limit": limit,
            "seconds": RENDER_S,
        }
        self._limit = limit
        self._waiting: dict[int, deque[_Chat]] = {}
        self._children: list[_Child] = []

    def ask(self, key: int, channel: int, conversation: dict[str, Any]) -> None:
        """Render ``ChatFields.for_template()`` when its turn comes. ``channel`` is the connection of the client."""
        self._waiting.setdefault(channel, deque()).append(_Chat(key, channel, conversation))

    def cancel(self, key: int) -> None:
        """Drop the conversation of this key, or its result. A rendering that has begun goes on to its end."""
        for channel, queue in list(self._waiting.items()):
            self._waiting[channel] = deque(chat for chat in queue if chat.key != key)
            if not self._waiting[channel]:
                del self._waiting[channel]
        for child in self._children:
            if child.chat is not None and child.chat.key == key:
                child.chat = None

    @property
    def busy(self) -> bool:
        """Return whether ``collect`` has something to do, now or soon."""
        return bool(self._waiting) or any(child.at_work or child.gone for child in self._children)

    @property
    def descriptors(self) -> list[int]:
        """Return descriptors that become readable when ``collect`` has results."""
        return [child.socket.fileno() for child in self._children if child.at_work and not child.gone]

    def collect(self) -> list[Outcome]:
        """Return the results that are ready, and start what can be started. Does not block."""
        now = time.monotonic()
        done: list[Outcome] = []
        for child in list(self._children):
            child.look(now)
            if child.answer is not None:
                if child.chat is not None:
                    done.append((child.chat.key, self._text_of(child.answer)))
                if "last" in child.answer:
                    child.end()
                child.chat, child.answer = None, None
            if child.gone and child.process.poll() is not None:
                self._children.remove(child)
                child.free()
                if (chat := child.chat) is not None:
                    why = child.why()
                    if why.code is ErrorCode.HELPER_FAILED and chat.tries < MOST_TRIES:
                        # This conversation has already had its turn, so it goes before all others.
                        queue = self._waiting.pop(chat.channel, deque())
                        queue.appendleft(chat)
                        self._waiting = {chat.channel: queue, **self._waiting}
                    else:
                        done.append((chat.key, why))
        done += self._give_out(now)
        return done

    def _give_out(self, now: float) -> list[Outcome]:
        while self._waiting:
            alive = [child for child in self._children if not child.gone]
            free = next((child for child in alive if not child.at_work), None)
            soon = any(not child.ready or now - child.since < PATIENCE_S for child in alive)
            if free is None and (soon or len(self._children) >= MOST_CHILDREN):
                return []
            channel, queue = next(iter(self._waiting.items()))
            chat = queue.popleft()
            del self._waiting[channel]
            if queue:
                self._waiting[channel] = queue  # behind the other connections
            try:
                if free is None:
                    self._children.append(free := _Child(now))
                which = bool(chat.conversation["tools"])
                fixed = {**self._fixed, "template": self._sources[which], "form": self._forms[which]}
                free.give(chat, msgpack.packb({**fixed, **chat.conversation}), now)
            except OSError as e:
                if free is not None:
                    free.chat = None
                    free.end()
                return [(chat.key, _failed(f"cannot be started ({e.strerror or type(e).__name__})"))]
        idle = [child for child in self._children if not child.at_work and not child.gone]
        for child in idle[1:]:
            child.end()
        return []

    def _text_of(self, answer: dict[str, Any]) -> str | WireError:
        if "text" in answer:
            return str(answer["text"], "utf-8")
        if "size" in answer:
            return RequestError(
                f"the rendered messages have more than {self._limit} bytes, which is the most that can fit the context",
                field="messages",
                code=ErrorCode.CONTEXT_OVERFLOW,
            )
        return RequestError(str(answer["error"]), field=str(answer.get("field", "messages")))

    def close(self) -> None:
        """End the processes, and wait for that."""
        for child in self._children:
            child.end()
            child.process.wait()
            child.free()
        self._children.clear()
        self._waiting.clear()


class _Child:
    """One template child. It is given one conversation at a time, possibly before it is ``ready``.

    A conversation and its text lie in a file in memory that both processes have open. Only the lengths go through the
    socket. A pipe or socket holds less, so a long conversation would have to be written in pieces, between steps.
    Raises OSError if no process can be started.
    """

    def __init__(self, now: float) -> None:
        self.chat: _Chat | None = None
        """The conversation that was given last, until its answer is taken; None if its answer is not wanted."""
        self.answer: dict[str, Any] | None = None
        self.at_work = False
        self.ready = False
        self.gone = False
        self.since = now
        """The time at which the process was started, was ready, or was given its present conversation (monotonic
        seconds)."""
        self._fault = ""
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._mailbox = -1
        try:
            self._mailbox = os.memfd_create("conversation")
            # -S: the child gets the worker's import path, so it need not search for it again. Popen uses vfork where it
            # can, and so does not copy the page tables of a worker, which has much memory mapped.
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-P", _PROGRAM, str(os.getpid()), str(self._mailbox)],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=(self._mailbox,),
                env=helper_environment(PYTHONPATH=os.pathsep.join([*filter(None, sys.path), _ROOT])),
            )
        except OSError:
            self.free()
            raise
        finally:
            theirs.close()
        self.socket.setblocking(False)

    def give(self, chat: _Chat, request: bytes, now: float) -> None:
        """Hand over a conversation, packed as ``request``. Raises OSError.

        A process has one conversation at a time, so the socket always has room.
        """
        self.chat, self.at_work, self.answer = chat, True, None
        chat.tries += 1
        if self.ready:
            self.since = now
        os.ftruncate(self._mailbox, 0)
        os.pwrite(self._mailbox, request, 0)
        try:
            self.socket.send(len(request).to_bytes(8, "little"))
        except BrokenPipeError:  # the process died while idle: its exit code says how
            self.gone = True

    def look(self, now: float) -> None:
        """Read what the process has sent, and kill the process if it is late."""
        if self.gone:
            return
        try:
            head = self.socket.recv(8)
        except BlockingIOError:
            patience = LEASE_S if self.ready else START_S
            if self.at_work and now - self.since > patience:
                self._fault = "stands still" if self.ready else "does not start"
                self.end()
            return
        except ConnectionResetError:
            head = b""
        if not head:
            self.gone = True
        elif not self.ready:
            self.ready, self.since = True, now
            self.look(now)
        else:
            self._read_answer(min(int.from_bytes(head, "little"), _LONGEST_ANSWER))

    def _read_answer(self, length: int) -> None:
        """Read the answer. Accept nothing but a valid map: a template may have broken out of the sandbox."""
        packed = os.pread(self._mailbox, length, 0)
        os.ftruncate(self._mailbox, 0)
        try:
            answer = msgpack.unpackb(packed)
            if not isinstance(answer, dict) or not isinstance(answer.get("text", b""), bytes):
                raise ValueError("no answer")
            if not answer.keys() & {"text", "size", "error", "forms"}:
                raise ValueError("no answer")
            answer.get("text", b"").decode()
        except (ValueError, msgpack.UnpackException):
            self._fault = "answers nonsense"
            self.end()
        else:
            self.answer, self.at_work = answer, False

    def end(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.gone = True

    def why(self) -> WireError:
        """Return the error for the request of a process that has ended without an answer."""
        code = self.process.returncode
        if self._fault in ("stands still", "does not start"):
            return _failed(self._fault)
        if self._fault:
            return WireError(ErrorCode.INTERNAL, f"the process that renders chats {self._fault}")
        if code == -signal.SIGPROF:
            return RequestError(
                f"the model's chat template takes longer than {RENDER_S:g} s of processor time to render these "
                "messages",
                field="messages",
            )
        if code >= 0 or -code in _CRASHES:
            how = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
            return WireError(ErrorCode.INTERNAL, f"the process that renders chats {how}")
        return _failed(f"was ended by signal {-code}")

    def free(self) -> None:
        self.socket.close()
        if self._mailbox >= 0:
            os.close(self._mailbox)


def probe_template(template: ChatTemplate, alive: Callable[[], None] = lambda: None) -> tuple[Form, Form]:
    """Return what a model's template can take, for conversations without tools and with tools. Blocks for a moment.

    alive  is called at least every tenth of a second

    Raises ChildProcessError if the process that renders chats cannot be started, or is killed twice.
    """
    sources = [template.source, *([template.tool_source] if template.tool_source else [])]
    request = {"templates": sources, "special_tokens": dict(template.special_tokens), "seconds": PROBES_S}
    for _ in range(MOST_TRIES):
        child = _Child(time.monotonic())
        try:
            child.give(_Chat(0, 0, {}), msgpack.packb(request), time.monotonic())
            while child.answer is None and not child.gone:
                alive()
                select.select([child.socket], [], [], 0.1)
                child.look(time.monotonic())
            if child.answer is not None:
                forms = [Form.from_wire(form) for form in child.answer["forms"]]
                return forms[0], forms[-1]
            child.process.wait()
            why = child.why()
        except (KeyError, IndexError, TypeError, ValueError):
            why = WireError(ErrorCode.INTERNAL, "it answers nonsense")
        finally:
            child.end()
            child.process.wait()
            child.free()
        if why.code is not ErrorCode.HELPER_FAILED:
            late = child.process.returncode == -signal.SIGPROF
            error = f"it takes longer than {PROBES_S:g} s of processor time for a few words" if late else why.message
            return (failed := Form(error=error)), failed
    raise ChildProcessError(why.message)


def _failed(how: str) -> WireError:
    """Return the error for a request whose process failed for a reason that has nothing to do with the request."""
    message = f"the process that renders chats {how}: send the request again"
    return WireError(ErrorCode.HELPER_FAILED, message, retry_after_ms=RETRY_MS)
