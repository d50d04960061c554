"""The compiled fast path of ``WorkerEvents.events``. The reference in Python is ``requests_of_whole_frame`` there.

A frame takes the fast path if EventWriter wrote it, if it comes from the worker's present generation, and if every
event in it is the next one expected for a running request. That request has credit, holds no events back, and does not
end with this event. The frame has at most one event of each request. The fast path leaves every other frame to Python,
and then has changed nothing.
"""

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_GET_SIZE, PyByteArray_Resize
from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject
from libc.string cimport memcpy

from protocol.messages import TERMINAL, VERSION, Kind
from protocol.process.sources cimport MODELCTL_SOURCES
from supervisor.requests.request_phase import RequestPhase
from supervisor.requests.counters import COMPLETION

SOURCES = MODELCTL_SOURCES

cdef Py_ssize_t _COMPLETION = COMPLETION
cdef object _RUNNING = RequestPhase.RUNNING
cdef unsigned char _VERSION = VERSION
cdef unsigned char _EVENTS = int(Kind.EVENTS)
cdef unsigned long long _TERMINAL = int(TERMINAL)
cdef unsigned long long _frame_number = 0  # of the frame that ``fits`` was last asked about


cdef class RequestProgress:
    """What changes of a request with every event. ``request`` describes the fields."""

    def __init__(self, long long credit, bint resumable):
        self.phase, self.ids, self.credit, self.resumable = RequestPhase.WAITING, bytearray(), credit, resumable
        self.sent = self.delivered_tokens = self.unpaid = self.last_frame = 0
        self.has_tokens = self.holds = False
        self.first_token = 0.0
        self.counters, self.completion = None, NULL

    def count_in(self, counters not None):
        cdef Py_buffer buffer
        PyObject_GetBuffer(counters, &buffer, PyBUF_WRITABLE)
        try:
            if buffer.len < 8 * (_COMPLETION + 1):
                raise ValueError(f"{buffer.len} bytes are no counters")
            self.completion = <unsigned long long *>buffer.buf + _COMPLETION
        finally:
            PyBuffer_Release(&buffer)
        self.counters = counters  # it keeps the memory, which ``completion`` points into


cdef const unsigned char *_unsigned(
    const unsigned char *at, const unsigned char *end, unsigned long long *value
) noexcept nogil:
    """Read an unsigned integer of msgpack. Return the position behind it; NULL if there is none at ``at``.

    Never reads at or behind ``end``.
    """
    cdef int length
    cdef unsigned long long found = 0
    if at is NULL or at >= end:
        return NULL
    if at[0] < 0x80:
        value[0] = at[0]
        return at + 1
    if not 0xCC <= at[0] <= 0xCF:
        return NULL
    length = 1 << (at[0] - 0xCC)
    if end - at <= length:
        return NULL
    for i in range(1, length + 1):
        found = found << 8 | at[i]
    value[0] = found
    return at + length + 1


cdef bint _read(const unsigned char *at, size_t size, Frame *frame) noexcept nogil:
    """Divide a frame into its parts. Return whether it has the form of one that may take the fast path.

    All parts then lie within ``size`` bytes.
    """
    cdef const unsigned char *end = at + size
    cdef unsigned long long total = 0, length
    cdef Entry *entry
    if not 3 < size <= MOST_BYTES or at[0] != 0x96 or at[1] != _VERSION or at[2] != _EVENTS:
        return False
    at = _unsigned(_unsigned(at + 3, end, &frame.channel), end, &frame.generation)
    if at is NULL or at >= end:
        return False
    if 0x90 <= at[0] <= 0x9F:
        frame.count = at[0] & 0x0F
        at += 1
    elif at[0] == 0xDC and end - at > 3:
        frame.count = at[1] << 8 | at[2]
        at += 3
    else:
        return False
    if not 0 < frame.count <= MOST_EVENTS:
        return False
    for i in range(frame.count):
        if at >= end or at[0] != 0x95:
            return False
        entry = &frame.entries[i]
        at = _unsigned(_unsigned(at + 1, end, &entry.request), end, &entry.seq)
        at = _unsigned(_unsigned(at, end, &entry.flags), end, &entry.tokens)
        at = _unsigned(at, end, &entry.length)
        # Each number is bounded by itself, so that no sum or product of them can overflow.
        if at is NULL or entry.flags > 255 or entry.length > MOST_BYTES or entry.tokens > entry.length // 4:
            return False
        if entry.flags & _TERMINAL:
            return False
        total += entry.length
    if end - at >= 2 and at[0] == 0xC4:
        length, at = at[1], at + 2
    elif end - at >= 3 and at[0] == 0xC5:
        length, at = at[1] << 8 | at[2], at + 3
    else:
        return False
    frame.body = at
    return length == total and <unsigned long long>(end - at) == total


cdef class FastPath:
    """Decides for one frame after the other whether it takes the fast path. For one thread."""

    cdef int of(self, object worker_slot) except -1:
        """Expect frames of this worker. Call this again whenever Python code may have changed the slot."""
        self.running, self.generation = worker_slot.running, worker_slot.generation
        return 0

    cdef bint fits(self, const unsigned char *data, size_t size) except -1:
        """Return whether a frame of the worker takes the fast path. Nothing is changed.

        The caller keeps ``data`` valid until it has called ``passed``.
        """
        global _frame_number
        cdef PyObject *found
        cdef object channel
        cdef RequestProgress stream
        if not _read(data, size, &self.frame) or self.frame.generation != self.generation:
            return False
        _frame_number += 1
        self.begins = False
        channel = self.frame.channel
        for i in range(self.frame.count):
            entry = &self.frame.entries[i]
            found = PyDict_GetItem(self.running, (channel, entry.request))
            if found is NULL:
                return False
            stream = <object>found
            if (
                stream.last_frame == _frame_number  # the frame has two events of this request
                or stream.sent != entry.seq
                or stream.credit < 1
                or stream.holds
                or stream.phase is not _RUNNING
            ):
                return False
            stream.last_frame = _frame_number
            if entry.tokens and not stream.has_tokens:
                self.begins = True
            self.streams[i] = found  # a reference that ``running`` owns: nothing changes ``running`` before ``passed``
        return True

    cdef unsigned long long passed(self, double now) except? 0xFFFFFFFFFFFFFFFF:
        """Note the events of the last frame that fitted, which is on its way to its client.

        Return how many tokens are in them. The caller adds these to the worker slot's count.

        now  monotonic seconds. It is needed only if ``begins``, so that no other frame costs a look at the clock
        """
        cdef const unsigned char *at = self.frame.body
        cdef unsigned long long tokens = 0
        cdef RequestProgress stream
        for i in range(self.frame.count):
            entry = &self.frame.entries[i]
            stream = <object><PyObject *>self.streams[i]
            stream.sent += 1
            stream.credit -= 1
            if entry.tokens:
                tokens += entry.tokens
                if not stream.has_tokens:
                    stream.has_tokens, stream.first_token = True, now
                stream.unpaid += entry.tokens
                stream.delivered_tokens += entry.tokens
                if stream.completion is not NULL:
                    stream.completion[0] += entry.tokens
                if stream.resumable:
                    _append(stream.ids, at, 4 * entry.tokens)
            at += entry.length
        return tokens

    def take(self, bytes frame not None, worker_slot, double now=0.0):
        """Do with a frame what ``relay`` does, but without sockets. Only tests call this. See fast_path.pyi."""
        self.of(worker_slot)
        if not self.fits(frame, len(frame)):
            return None
        worker_slot.tokens += self.passed(now)
        return self.frame.channel


cdef int _append(bytearray ids, const unsigned char *data, Py_ssize_t size) except -1:
    cdef Py_ssize_t before = PyByteArray_GET_SIZE(ids)
    PyByteArray_Resize(ids, before + size)
    memcpy(PyByteArray_AS_STRING(ids) + before, data, size)
    return 0
