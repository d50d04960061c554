"""Conversations to text, in processes that may be killed: see ``template_child``. No thread, and nothing here waits.

A template that loops, or allocates without end, costs its own request a second; the worker's steps go on meanwhile.
One process does for templates as they should be. While one is at work for longer than PATIENCE_S and others wait,
there are more, and the waiting are taken in turns of the connections that they came by, so that a client whose
conversations take long delays others little.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgpack

from model_worker.engine import ChatTemplate
from protocol.errors import ErrorCode, RequestError, WireError
from protocol.helper_environment import helper_environment

RENDER_S = 1.0
"""Seconds that compiling and rendering a template may take."""
GRACE_S = 1.0
"""The process ends itself by an alarm. One that has not (it was stopped, say) is killed this much later."""
START_S = 20.0
"""Seconds that a process may take to start, on however busy a machine."""
PATIENCE_S = 0.05
MOST_CHILDREN = 4
_LONGEST_ANSWER = 64 << 20
_PROGRAM = str(Path(__file__).with_name("template_child.py"))
_ROOT = str(Path(__file__).resolve().parent.parent)
"""Where this package is imported from. In an editable install it need not be in ``sys.path``."""

Outcome = tuple[int, str | WireError]


class Renderer:
    """Renders conversations by a model's template.

    template  the model's own
    limit     most bytes of a rendered text

    ``ask`` gives it one under a key; ``collect`` hands out, in the order of being done, what became of each: the text,
    or a RequestError (field "messages"), or WireError INTERNAL if a process died. Children are started when needed.
    """

    def __init__(self, template: ChatTemplate, limit: int) -> None:
        self._sources = template.source, template.tool_source or template.source
        self._fixed = {
            "special_tokens": dict(template.special_tokens),
            "limit": limit,
            "seconds": RENDER_S,
        }
        self._limit = limit
        self._waiting: dict[int, deque[tuple[int, dict[str, Any]]]] = {}
        self._children: list[_Child] = []

    def ask(self, key: int, channel: int, conversation: dict[str, Any]) -> None:
        """Render ``Conversation.for_template()`` when its turn comes. ``channel`` is the connection that it came by."""
        self._waiting.setdefault(channel, deque()).append((key, conversation))

    def cancel(self, key: int) -> None:
        """Nothing comes of this key any more. What is being rendered is rendered to its end, and left."""
        for channel, queue in list(self._waiting.items()):
            self._waiting[channel] = deque(entry for entry in queue if entry[0] != key)
            if not self._waiting[channel]:
                del self._waiting[channel]
        for child in self._children:
            if child.key == key:
                child.key = None

    @property
    def busy(self) -> bool:
        """Whether ``collect`` has something to do, now or soon."""
        return bool(self._waiting) or any(child.at_work or child.gone for child in self._children)

    @property
    def descriptors(self) -> list[int]:
        """Readable when ``collect`` has news."""
        return [child.socket.fileno() for child in self._children if child.at_work and not child.gone]

    @property
    def pids(self) -> list[int]:
        return [child.process.pid for child in self._children]

    def collect(self) -> list[Outcome]:
        """What is done; starts what can be started. Never waits."""
        now = time.monotonic()
        done: list[Outcome] = []
        for child in list(self._children):
            child.look(now)
            if child.answer is not None:
                if child.key is not None:
                    done.append((child.key, self._text_of(child.answer)))
                if "last" in child.answer:
                    child.end()
                child.key, child.answer = None, None
            if child.gone and child.process.poll() is not None:
                self._children.remove(child)
                child.free()
                if child.key is not None:
                    done.append((child.key, child.why()))
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
            key, conversation = queue.popleft()
            del self._waiting[channel]
            if queue:
                self._waiting[channel] = queue  # behind the other connections
            try:
                if free is None:
                    self._children.append(free := _Child(now))
                source = self._sources[bool(conversation["tools"])]
                free.give(key, msgpack.packb({**self._fixed, **conversation, "template": source}), now)
            except OSError as e:
                if free is not None:
                    free.key = None
                    free.end()
                why = e.strerror or type(e).__name__
                return [(key, WireError(ErrorCode.INTERNAL, f"no process can be had that renders chats: {why}"))]
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
    """One process. It is given one conversation at a time, also before it is ``ready``.

    A conversation and its text stand in a file in memory that both have open, and only their lengths go through the
    socket: a pipe or socket holds less, so that a long conversation would have to be written in pieces, between steps.
    Raises OSError if no process can be had.
    """

    def __init__(self, now: float) -> None:
        self.key: int | None = None
        """Of whom the answer is; None if nobody waits for it."""
        self.answer: dict[str, Any] | None = None
        self.at_work = False
        self.ready = False
        self.gone = False
        self.since = now
        """When it was started, or given what it is at work on."""
        self._fault = ""
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._mailbox = -1
        try:
            self._mailbox = os.memfd_create("conversation")
            # -S: what the worker imports from, this can import from, without looking for it again. Popen does not fork
            # where it can vfork: a worker has much memory mapped.
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

    def give(self, key: int, request: bytes, now: float) -> None:
        """One at a time, so that the socket always has room for this. Raises OSError."""
        self.key, self.at_work, self.answer = key, True, None
        if self.ready:
            self.since = now
        os.ftruncate(self._mailbox, 0)
        os.pwrite(self._mailbox, request, 0)
        try:
            self.socket.send(len(request).to_bytes(8, "little"))
        except BrokenPipeError:  # died idle, just now: its end says how
            self.gone = True

    def look(self, now: float) -> None:
        """Take what it sent; end it if it is late."""
        if self.gone:
            return
        try:
            head = self.socket.recv(8)
        except BlockingIOError:
            patience = RENDER_S + GRACE_S if self.ready else START_S
            if self.at_work and now - self.since > patience:
                self._fault = "takes too long" if self.ready else "does not start"
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
        """Where a template got the better of the sandbox, this is the next wall: nothing but a map is taken."""
        packed = os.pread(self._mailbox, length, 0)
        os.ftruncate(self._mailbox, 0)
        try:
            answer = msgpack.unpackb(packed)
            if not isinstance(answer, dict) or not isinstance(answer.get("text", b""), bytes):
                raise ValueError("no answer")
            if not answer.keys() & {"text", "size", "error"}:
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
        """What its request is told when it has ended without an answer."""
        code = self.process.returncode
        if code == -signal.SIGALRM or self._fault == "takes too long":
            return RequestError(
                f"the model's chat template takes longer than {RENDER_S:g} s to render these messages", field="messages"
            )
        how = self._fault or (f"was ended by signal {-code}" if code < 0 else f"ended with code {code}")
        return WireError(ErrorCode.INTERNAL, f"the process that renders chats {how}: try again")

    def free(self) -> None:
        self.socket.close()
        if self._mailbox >= 0:
            os.close(self._mailbox)
