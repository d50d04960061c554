"""libzmq's own calls as pyzmq's extension has loaded them: the same library, whose sockets these are."""

from cpython.object cimport PyObject_GenericGetAttr
from libc.errno cimport EINTR, errno
from posix.dlfcn cimport RTLD_LAZY, dlerror, dlopen, dlsym

import zmq
from zmq.backend.cython import _zmq

cdef extern from *:
    """
    #ifndef MODELCTL_SOURCES
    #define MODELCTL_SOURCES 0
    #endif
    """
    const unsigned int MODELCTL_SOURCES

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


def has_input(object socket):
    return is_readable(handle_of(socket))


_load()
