"""libzmq's own calls as pyzmq's extension has loaded them: the same library, whose sockets these are."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.object cimport PyObject_GenericGetAttr
from libc.errno cimport EINTR, errno
from posix.dlfcn cimport RTLD_LAZY, dlerror, dlopen, dlsym

import zmq
from zmq.backend.cython import _zmq

from protocol.process.sources cimport MODELCTL_SOURCES

SOURCES = MODELCTL_SOURCES


cdef void *_find(void *library, const char *name) except NULL:
    cdef void *found = dlsym(library, name)
    if found is NULL:
        raise ImportError(f"libzmq has no {name.decode()}")
    return found


cdef _load():
    if not zmq.zmq_version_info()[:2] == (4, 3):
        raise ImportError(f"libzmq {zmq.zmq_version()}: only 4.3 is known")
    # It is loaded already, with libzmq among what it depends on, which is where dlsym looks. Never closed.
    cdef void *library = dlopen(_zmq.__file__.encode(), RTLD_LAZY)
    if library is NULL:
        raise ImportError(dlerror().decode())
    calls.init = <OnMessage>_find(library, b"zmq_msg_init")
    calls.init_size = <OnSized>_find(library, b"zmq_msg_init_size")
    calls.close = <OnMessage>_find(library, b"zmq_msg_close")
    calls.receive = <OnSocket>_find(library, b"zmq_msg_recv")
    calls.send = <OnSocket>_find(library, b"zmq_msg_send")
    calls.send_bytes = <OnBytes>_find(library, b"zmq_send")
    calls.data = <DataOf>_find(library, b"zmq_msg_data")
    calls.size = <SizeOf>_find(library, b"zmq_msg_size")
    calls.more = <int (*)(const Message *) noexcept nogil>_find(library, b"zmq_msg_more")
    calls.option = <OptionOf>_find(library, b"zmq_getsockopt")


cdef void *handle_of(object socket) except NULL:
    """Of a socket that is open. Raises ZMQError (ENOTSOCK) for one that is not."""
    # Not as an attribute is usually got: zmq.Socket has a __getattr__, which makes that twice as dear.
    cdef void *handle = <void *><size_t>PyObject_GenericGetAttr(socket, "underlying")
    if handle is NULL:  # as close() leaves it
        raise zmq.ZMQError(zmq.ENOTSOCK)
    return handle


cdef bint is_readable(void *socket) except -1:
    """Whether a message can be received now. Raises ZMQError."""
    cdef int events = 0
    cdef size_t size = sizeof(events)
    while calls.option(socket, EVENTS, &events, &size) < 0:
        if errno != EINTR:
            raise zmq.ZMQError(errno)
    return events & READABLE != 0


cdef bytes bytes_of(Message *message):
    """A copy of what is in it."""
    return PyBytes_FromStringAndSize(<const char *>calls.data(message), calls.size(message))


cdef int send_message(Message *message, void *socket) noexcept:
    """Without waiting. 0, or errno; then the message is still the caller's."""
    while calls.send(message, socket, DONT_WAIT) < 0:
        if errno != EINTR:
            return errno
    return 0


cdef int send_bytes(void *socket, bytes part, int flags) noexcept:
    """Without waiting. 0, or errno.

    flags  0, or MORE_FOLLOWS
    """
    while calls.send_bytes(socket, PyBytes_AS_STRING(part), PyBytes_GET_SIZE(part), DONT_WAIT | flags) < 0:
        if errno != EINTR:
            return errno
    return 0


def has_input(object socket):
    return is_readable(handle_of(socket))


_load()
