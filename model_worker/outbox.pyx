"""The compiled twin of the classes Plain… of ``link``: the events of one step become one frame for each channel, without Python.

The fast path takes ordinary events only: a NewTokens of a job that the loop has, with a text and token ids as engines give
them, and no log-probabilities. This module decides and refuses nothing else. The Python code handles every other event
and hands in the result (``queue``), so that all events leave in their order.

The frames are byte for byte those of EventWriter. The class stands in one file because Cython calls a ``cdef``
function without Python only within one module: msgpack's heads, the buffers and the loop are one compilation unit.
"""

from collections import deque

from cpython.bytes cimport PyBytes_AS_STRING
from cpython.dict cimport PyDict_GetItem
from cpython.exc cimport PyErr_CheckSignals, PyErr_Clear
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.mem cimport PyMem_Free, PyMem_Realloc
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.errno cimport EAGAIN
from libc.stdint cimport UINT32_MAX
from libc.string cimport memcpy
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

import zmq

from model_worker.engine import NewTokens
from protocol.process.worker_spec import ProgressLease
from protocol.process.libzmq cimport Message, bytes_of, calls, handle_of, is_readable, send_bytes, send_message
from protocol.messages import VERSION, EventFlag, Kind
from protocol.process.sources cimport MODELCTL_SOURCES

cdef extern from "Python.h":
    const char *PyUnicode_AsUTF8AndSize(object text, Py_ssize_t *size)

cdef extern from *:
    """
    #include <structmember.h>
    /* Return where an instance of a class with slots keeps the field of this descriptor; -1 if it is no slot's. */
    static Py_ssize_t modelctl_slot(PyObject *descriptor) {
        PyMemberDef *member;
        if (!Py_IS_TYPE(descriptor, &PyMemberDescr_Type)) return -1;
        member = ((PyMemberDescrObject *)descriptor)->d_member;
        return member->type == T_OBJECT_EX ? member->offset : -1;
    }
    """
    Py_ssize_t modelctl_slot(object descriptor)

SOURCES = MODELCTL_SOURCES

cdef enum:
    MOST_TOKENS = 4096  # of an event on the fast path
    MOST_TEXT = 65535  # bytes
    TEXT_HEAD = 9  # bytes before a text, at most
    KEPT_PILES = 256  # buffers that are kept to be used again,
    KEPT_EVENTS = 64  # each with room for at most so many events
    KEPT_BYTES = 8192

# Seconds between two looks for input, at least, since each look calls the kernel twice. If steps are longer, there is
# one look after every step.
cdef double LOOK_S = 20e-6

ctypedef unsigned long long u64

cdef object _BEAT = ProgressLease
cdef object _DELTA = NewTokens
cdef Py_ssize_t _JOB = _slot("job")
cdef Py_ssize_t _TOKEN_IDS = _slot("token_ids")
cdef Py_ssize_t _TEXT = _slot("text")
cdef Py_ssize_t _LOGPROBS = _slot("logprobs")
cdef unsigned char _VERSION = VERSION
cdef unsigned char _EVENTS = int(Kind.EVENTS)
cdef u64 _FIRST = int(EventFlag.FIRST)
cdef u64 _MOST_SEQ = 1 << 63


cdef Py_ssize_t _slot(str name) except -1:
    """Return where a NewTokens keeps a field. Reading it there costs a tenth of reading the attribute."""
    cdef Py_ssize_t found = modelctl_slot(NewTokens.__dict__[name])
    if found < 0:
        raise ImportError(f"NewTokens.{name} is not in a slot")
    return found


cdef inline object _field(object delta, Py_ssize_t slot):
    """Return a field of a NewTokens; None if the field was deleted."""
    cdef PyObject *found = (<PyObject **>(<char *><PyObject *>delta + slot))[0]
    return None if found is NULL else <object>found


cdef struct Entry:
    u64 request, seq, flags, tokens, length


cdef class JobCursor:
    """The compiled twin of ``link.PlainJobCursor``."""

    cdef readonly object channel  # an int: a key of dicts
    cdef readonly u64 request
    cdef public u64 seq, tokens

    def __init__(self, u64 channel, u64 request, u64 seq, u64 tokens):
        self.channel, self.request, self.seq, self.tokens = channel, request, seq, tokens


cdef class FrameBuffer:
    """The events of one channel that are not in a frame yet: their index, and their bytes one after the other."""

    cdef u64 channel
    cdef Entry *entries
    cdef unsigned char *body
    cdef Py_ssize_t count, events_room, size, bytes_room

    def __cinit__(self, u64 channel):
        self.channel = channel

    def __dealloc__(self):
        PyMem_Free(self.entries)
        PyMem_Free(self.body)

    cdef int make_room(self, Py_ssize_t size) except -1:
        """Make room for one more event of ``size`` bytes. Raises MemoryError, and then leaves the buffer unchanged."""
        cdef void *moved
        cdef Py_ssize_t wanted
        if self.count == self.events_room:
            wanted = 2 * self.events_room + 16
            moved = PyMem_Realloc(self.entries, wanted * sizeof(Entry))
            if moved is NULL:
                raise MemoryError
            self.entries, self.events_room = <Entry *>moved, wanted
        if size > self.bytes_room - self.size:
            wanted = self.bytes_room + self.bytes_room // 2 + size + 1024
            moved = PyMem_Realloc(self.body, wanted)
            if moved is NULL:
                raise MemoryError
            self.body, self.bytes_room = <unsigned char *>moved, wanted
        return 0

    cdef void add(self, u64 request, u64 seq, u64 flags, u64 tokens, Py_ssize_t length) noexcept:
        """Add an event whose bytes are already behind those of the other events."""
        cdef Entry *entry = &self.entries[self.count]
        entry.request, entry.seq, entry.flags, entry.tokens, entry.length = request, seq, flags, tokens, length
        self.count += 1
        self.size += length

    cdef void clear(self) noexcept:
        """Empty the buffer, and free the room that it gained while the pipe was full."""
        self.count = self.size = 0
        if self.events_room > KEPT_EVENTS:
            PyMem_Free(self.entries)
            self.entries, self.events_room = NULL, 0
        if self.bytes_room > KEPT_BYTES:
            PyMem_Free(self.body)
            self.body, self.bytes_room = NULL, 0


cdef class Outbox:
    """The compiled twin of ``link.PlainOutbox``. For one thread."""

    cdef object _socket, _frames
    cdef u64 _generation
    cdef Py_ssize_t _most_events
    cdef u64 _most_bytes
    cdef dict _buffers  # channel → FrameBuffer, perhaps empty
    cdef list _waiting  # the buffers that are not empty, in the order of their first events

    def __init__(self, socket, u64 generation, Py_ssize_t most_events, u64 most_bytes):
        if most_events < 1:
            raise ValueError(f"most_events is {most_events}: a frame has at least one")
        self._socket, self._generation = socket, generation
        self._most_events, self._most_bytes = most_events, most_bytes
        self._frames, self._buffers, self._waiting = deque(), {}, []

    def steps(self, step, lease, dict jobs not None, double until):
        cdef Py_ssize_t at
        cdef double looked = _now(), now
        cdef u64[::1] words = lease.words if type(lease) is _BEAT else None
        cdef u64 bits = lease.step_bits
        while True:
            if words is None:
                lease.step()
            else:
                words[0] = ((words[0] >> 32) + 1) << 32 | bits
            events = step()
            at = self._take(events, 0, jobs)
            if at < len(events):
                return events, at
            self._flush()
            PyErr_CheckSignals()
            now = _now()
            if now >= until:
                return events, at
            if now - looked >= LOOK_S:
                looked = now
                if is_readable(handle_of(self._socket)):
                    return events, at

    def take(self, events, Py_ssize_t first, dict jobs not None):
        return self._take(events, first, jobs)

    cdef Py_ssize_t _take(self, object events, Py_ssize_t first, dict jobs) except -1:
        if first < 0:
            raise ValueError(f"event {first}: they are counted from 0")
        if type(events) is not list:
            return first
        while first < len(<list>events) and self._usual(<object>PyList_GET_ITEM(events, first), jobs):
            first += 1
        return first

    cdef bint _usual(self, object event, dict jobs) except -1:
        """Queue an ordinary event. Return False, and do nothing, if the event is not ordinary.

        No Python code runs in here, because only exact types are looked at. So nothing changes meanwhile.
        """
        cdef PyObject *found
        cdef JobCursor cursor
        cdef FrameBuffer buffer
        cdef object ids, text, job, logprobs
        cdef Py_ssize_t tokens, size
        cdef const char *utf8
        cdef unsigned char *at
        cdef unsigned char *end
        if type(event) is not _DELTA:
            return False
        job, ids = _field(event, _JOB), _field(event, _TOKEN_IDS)
        text, logprobs = _field(event, _TEXT), _field(event, _LOGPROBS)
        if type(job) is not int or type(text) is not str:
            return False
        if type(logprobs) is tuple:
            if PyTuple_GET_SIZE(logprobs):
                return False
        elif type(logprobs) is not list or PyList_GET_SIZE(logprobs):
            return False
        if type(ids) is tuple:
            tokens = PyTuple_GET_SIZE(ids)
        elif type(ids) is list:
            tokens = PyList_GET_SIZE(ids)
        else:
            return False
        found = PyDict_GetItem(jobs, job)
        if found is NULL or not isinstance(<object>found, JobCursor):
            return False
        cursor = <JobCursor>found
        utf8 = PyUnicode_AsUTF8AndSize(text, &size)
        if utf8 is NULL:  # a lone surrogate
            PyErr_Clear()
            return False
        if not (tokens or size):
            return True
        if tokens > MOST_TOKENS or size > MOST_TEXT or cursor.seq >= _MOST_SEQ or cursor.tokens >= _MOST_SEQ:
            return False
        if not _are_ids(ids, tokens):
            return False
        buffer = self._pile(cursor.channel, 4 * tokens + TEXT_HEAD + size)
        at = buffer.body + buffer.size
        end = _write_text(_write_ids(at, ids, tokens), utf8, size)
        buffer.add(cursor.request, cursor.seq, _FIRST if tokens and not cursor.tokens else 0, tokens, end - at)
        cursor.seq += 1
        cursor.tokens += tokens
        return True

    cdef FrameBuffer _pile(self, object channel, Py_ssize_t size):
        """Return the channel's buffer, with room for an event of ``size`` bytes, which the caller must add."""
        cdef PyObject *found = PyDict_GetItem(self._buffers, channel)
        cdef FrameBuffer buffer
        if found is not NULL:
            buffer = <FrameBuffer>found
        else:
            buffer = self._buffers[channel] = FrameBuffer(channel)
        buffer.make_room(size)
        if not buffer.count:
            self._waiting.append(buffer)
        return buffer

    def queue(self, u64 channel, entry, bytes event not None):
        cdef u64 request, seq, flags, tokens, length
        request, seq, flags, tokens, length = entry
        if length != <u64>len(event):
            raise ValueError(f"an event of {len(event)} bytes, whose entry says {length}")
        cdef FrameBuffer buffer = self._pile(channel, length)
        memcpy(buffer.body + buffer.size, PyBytes_AS_STRING(event), length)
        buffer.add(request, seq, flags, tokens, length)

    def answer(self, bytes frame not None):
        self._frames.append(frame)
        self._send_frames()

    def flush(self):
        self._flush()

    cdef int _flush(self) except -1:
        cdef FrameBuffer buffer
        if not (self._waiting or self._frames) or not self._send_frames():
            return 0
        cdef void *socket = handle_of(self._socket)
        cdef int failed = 0
        for buffer in self._waiting:
            failed = self._send_pile(buffer, socket, failed)
            buffer.clear()
        self._waiting.clear()
        if len(self._buffers) > KEPT_PILES:
            self._buffers.clear()
        if failed and failed != EAGAIN:
            raise zmq.ZMQError(failed)
        return 0

    cdef int _send_pile(self, FrameBuffer buffer, void *socket, int failed) except -1:
        """Send a buffer's events as frames, or keep the frames once one could not be sent.

        failed  the errno of a frame before, 0 if all were sent

        Returns ``failed``, or the errno of a frame of this buffer.
        """
        cdef Message message
        cdef Py_ssize_t first = 0, last
        cdef u64 size, bytes_before = 0
        while first < buffer.count:
            size, last = buffer.entries[first].length, first + 1
            while (
                last < buffer.count
                and last - first < self._most_events
                and size + buffer.entries[last].length <= self._most_bytes
            ):
                size += buffer.entries[last].length
                last += 1
            self._write_frame(&message, buffer.channel, &buffer.entries[first], last - first, buffer.body + bytes_before, size)
            try:
                if not failed:
                    failed = send_message(&message, socket)
                if failed:
                    self._frames.append(bytes_of(&message))
            finally:
                calls.close(&message)  # a message that was sent is empty already
            bytes_before += size
            first = last
        return failed

    cdef int _write_frame(
        self, Message *message, u64 channel, const Entry *entries, Py_ssize_t count, const void *body, u64 size
    ) except -1:
        """Make a message of libzmq, which the caller must close. Raises MemoryError, and then there is no message."""
        cdef u64 index = 0
        cdef const Entry *entry
        cdef unsigned char *at
        cdef Py_ssize_t i
        for i in range(count):
            entry = &entries[i]
            index += 1 + _width(entry.request) + _width(entry.seq) + _width(entry.flags)
            index += _width(entry.tokens) + _width(entry.length)
        if count > UINT32_MAX or size > UINT32_MAX:
            raise ValueError(f"a frame of {count} events and {size} bytes: more than its lengths can say")
        cdef u64 whole = 3 + _width(channel) + _width(self._generation) + _array_head(count) + index + _bin_head(size)
        if calls.init_size(message, whole + size) < 0:
            raise MemoryError
        at = <unsigned char *>calls.data(message)
        at[0], at[1], at[2] = 0x96, _VERSION, _EVENTS
        at = _write_array_head(_write(_write(at + 3, channel), self._generation), count)
        for i in range(count):
            entry = &entries[i]
            at[0] = 0x95
            at = _write(_write(_write(at + 1, entry.request), entry.seq), entry.flags)
            at = _write(_write(at, entry.tokens), entry.length)
        memcpy(_write_bin_head(at, size), body, size)
        return 0

    cdef bint _send_frames(self) except -1:
        """Send the frames that are complete. Return whether all of them could be sent."""
        cdef void *socket
        cdef bytes frame
        cdef int failed
        if not self._frames:
            return True
        socket = handle_of(self._socket)
        while self._frames:
            frame = self._frames[0]
            failed = send_bytes(socket, frame, 0)
            if failed == EAGAIN:
                return False
            if failed:
                raise zmq.ZMQError(failed)
            self._frames.popleft()
        return True

    @property
    def unsent(self):
        return bool(self._waiting or self._frames)


cdef double _now() noexcept:
    """Return the seconds of ``time.monotonic()``."""
    cdef timespec found
    clock_gettime(CLOCK_MONOTONIC, &found)
    return found.tv_sec + found.tv_nsec * 1e-9


cdef bint _are_ids(object ids, Py_ssize_t count) except -1:
    """Return whether all elements of a tuple or list are integers that fit four bytes."""
    cdef object token
    cdef int overflow = 0
    cdef long long value
    cdef Py_ssize_t i
    for i in range(count):
        token = <object>(PyTuple_GET_ITEM(ids, i) if type(ids) is tuple else PyList_GET_ITEM(ids, i))
        if type(token) is not int:
            return False
        value = PyLong_AsLongLongAndOverflow(token, &overflow)
        if overflow or not 0 <= value <= UINT32_MAX:
            return False
    return True


cdef unsigned char *_write_ids(unsigned char *at, object ids, Py_ssize_t count) except NULL:
    """Write ids that pass ``_are_ids``, little endian. Return the address behind them."""
    cdef int overflow = 0
    cdef long long value
    cdef Py_ssize_t i
    for i in range(count):
        value = PyLong_AsLongLongAndOverflow(
            <object>(PyTuple_GET_ITEM(ids, i) if type(ids) is tuple else PyList_GET_ITEM(ids, i)), &overflow
        )
        at[0], at[1], at[2], at[3] = value & 0xFF, value >> 8 & 0xFF, value >> 16 & 0xFF, value >> 24 & 0xFF
        at += 4
    return at


cdef unsigned char *_write_text(unsigned char *at, const char *utf8, Py_ssize_t size) noexcept:
    """Write the map {"text": ...}, which takes up to TEXT_HEAD bytes and those of the text. Return the address behind
    it."""
    memcpy(at, b"\x81\xa4text", 6)
    at += 6
    if size < 32:
        at[0] = 0xA0 | size
        at += 1
    elif size < 256:
        at[0], at[1] = 0xD9, size
        at += 2
    else:
        at[0], at[1], at[2] = 0xDA, size >> 8 & 0xFF, size & 0xFF
        at += 3
    memcpy(at, utf8, size)
    return at + size


# --- msgpack: unsigned integers, and the heads of arrays and bins


cdef inline int _width(u64 value) noexcept:
    if value < 0x80:
        return 1
    if value <= 0xFF:
        return 2
    if value <= 0xFFFF:
        return 3
    return 5 if value <= UINT32_MAX else 9


cdef inline unsigned char *_big_endian(unsigned char *at, u64 value, int size) noexcept:
    cdef int i
    for i in range(size):
        at[i] = value >> 8 * (size - 1 - i) & 0xFF
    return at + size


cdef inline unsigned char *_write(unsigned char *at, u64 value) noexcept:
    if value < 0x80:
        at[0] = value
        return at + 1
    cdef int width = _width(value)
    at[0] = 0xCC if width == 2 else 0xCD if width == 3 else 0xCE if width == 5 else 0xCF
    return _big_endian(at + 1, value, width - 1)


cdef inline int _array_head(u64 count) noexcept:
    return 1 if count < 16 else 3 if count <= 0xFFFF else 5


cdef inline unsigned char *_write_array_head(unsigned char *at, u64 count) noexcept:
    if count < 16:
        at[0] = 0x90 | count
        return at + 1
    at[0] = 0xDC if count <= 0xFFFF else 0xDD
    return _big_endian(at + 1, count, _array_head(count) - 1)


cdef inline int _bin_head(u64 size) noexcept:
    return 2 if size <= 0xFF else 3 if size <= 0xFFFF else 5


cdef inline unsigned char *_write_bin_head(unsigned char *at, u64 size) noexcept:
    at[0] = 0xC4 if size <= 0xFF else 0xC5 if size <= 0xFFFF else 0xC6
    return _big_endian(at + 1, size, _bin_head(size) - 1)
