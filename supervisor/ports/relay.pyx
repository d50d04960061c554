"""Pass frames of workers on to clients without Python, as libzmq received them, if they take the ``fast_path``.

The frames of a worker are handled in the order in which they came. At the first frame that does not take the fast path,
the relay stops and returns that frame. It goes on when it is called again.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_GetItem
from cpython.object cimport PyObject
from libc.errno cimport EAGAIN, EINTR, errno
from libc.string cimport memcmp
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec

import zmq

from protocol.process.libzmq cimport (
    DONT_WAIT,
    MORE_FOLLOWS,
    Message,
    bytes_of,
    calls,
    handle_of,
    send_bytes,
    send_message,
)
from protocol.process.sources cimport MODELCTL_SOURCES
from supervisor.requests.fast_path cimport FastPath

SOURCES = MODELCTL_SOURCES


cdef class Relay:
    """Passes frames on from one worker port to one client port. For one thread."""

    cdef object _back, _front, _slot_of
    cdef dict _connections
    cdef FastPath _fast_path
    cdef bytes _client  # the routing id of ``_channel``, the channel of the last frame of this call; None before it
    cdef unsigned long long _channel

    def __init__(self, back, front, dict connections not None, slot_of):
        self._back, self._front, self._connections, self._slot_of = back, front, connections, slot_of
        self._fast_path = FastPath()

    def take(self, int limit):
        cdef void *back = handle_of(self._back)
        cdef void *front = handle_of(self._front)
        cdef Message sender, frame
        cdef bytes routing_id = None
        cdef object worker_slot = None
        cdef int taken = 0
        cdef unsigned long long tokens = 0
        self._client = None
        calls.init(&sender)
        calls.init(&frame)
        # Within a call nothing else runs, so nothing can change. So the worker slot of a routing id is looked up once
        # for consecutive frames of one worker, and a client's routing id once for consecutive frames to one client.
        try:
            while taken < limit:
                if not _receive(&sender, back, True):
                    return taken, None, None, False
                _receive(&frame, back, False)
                taken += 1
                if calls.more(&frame):
                    return taken, bytes_of(&sender), None, True
                if routing_id is None or not _equals(&sender, routing_id):
                    if tokens:
                        worker_slot.tokens += tokens
                        tokens = 0
                    routing_id = bytes_of(&sender)
                    worker_slot = self._slot_of(routing_id)
                    if worker_slot is not None:
                        self._fast_path.of(worker_slot)
                if worker_slot is None or not self._pass_on(&frame, front, &tokens):
                    return taken, routing_id, bytes_of(&frame), False
            return taken, None, None, False
        finally:
            calls.close(&sender)
            calls.close(&frame)
            if tokens:
                worker_slot.tokens += tokens

    cdef bint _pass_on(self, Message *frame, void *front, unsigned long long *tokens) except -1:
        """Pass a frame on if it takes the fast path and its client can be reached. Return whether it was passed on.

        If it was not, nothing has changed.
        """
        cdef PyObject *connection
        if not self._fast_path.fits(<const unsigned char *>calls.data(frame), calls.size(frame)):
            return False
        if self._client is None or self._fast_path.frame.channel != self._channel:
            connection = PyDict_GetItem(self._connections, self._fast_path.frame.channel)
            if connection is NULL:
                return False
            self._client, self._channel = (<object>connection).routing_id, self._fast_path.frame.channel
        # The first part names the client. libzmq refuses it with EHOSTUNREACH if the client is gone, and with EAGAIN if
        # the client is far behind.
        if send_bytes(front, self._client, MORE_FOLLOWS):
            return False
        # The events are noted before the frame is sent: afterwards its bytes belong to libzmq. And the frame is sent
        # even if there is no memory to note its events: after a first part alone, the next frame would go to this
        # client.
        try:
            tokens[0] += self._fast_path.passed(_monotonic() if self._fast_path.begins else 0.0)
        finally:
            if failed := send_message(frame, front):
                raise zmq.ZMQError(failed)
        return True


cdef bint _receive(Message *message, void *socket, bint may_be_none) except -1:
    """Take one part out of the socket. Return False if there is none and ``may_be_none``."""
    while calls.receive(message, socket, DONT_WAIT) < 0:
        if errno == EINTR:
            continue
        if may_be_none and errno == EAGAIN:
            return False
        raise zmq.ZMQError(errno)
    return True


cdef double _monotonic() noexcept:
    """Return the time as time.monotonic() does."""
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC, &now)
    return now.tv_sec + 1e-9 * now.tv_nsec


cdef bint _equals(Message *message, bytes other) noexcept:
    cdef size_t size = calls.size(message)
    return size == <size_t>PyBytes_GET_SIZE(other) and memcmp(calls.data(message), PyBytes_AS_STRING(other), size) == 0
