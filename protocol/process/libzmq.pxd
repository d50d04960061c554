# libzmq's own calls, for what is compiled (see compiled.py). They take ``socket.underlying`` of a zmq.Socket.

cdef struct Message:  # zmq_msg_t: 64 bytes, aligned as a pointer is
    unsigned long long room[8]

ctypedef int (*OnMessage)(Message *) noexcept nogil
ctypedef int (*OnSized)(Message *, size_t) noexcept nogil
ctypedef int (*OnSocket)(Message *, void *, int) noexcept nogil
ctypedef int (*OnBytes)(void *, const void *, size_t, int) noexcept nogil
ctypedef void *(*DataOf)(Message *) noexcept nogil
ctypedef size_t (*SizeOf)(const Message *) noexcept nogil
ctypedef int (*OptionOf)(void *, int, void *, size_t *) noexcept nogil

cdef struct Calls:
    OnMessage init  # zmq_msg_init
    OnSized init_size  # zmq_msg_init_size
    OnMessage close  # zmq_msg_close
    OnSocket receive  # zmq_msg_recv
    OnSocket send  # zmq_msg_send
    OnBytes send_bytes  # zmq_send
    DataOf data  # zmq_msg_data
    SizeOf size  # zmq_msg_size
    int (*more)(const Message *) noexcept nogil  # zmq_msg_more
    OptionOf option  # zmq_getsockopt

cdef Calls calls

cdef enum:
    DONT_WAIT = 1  # ZMQ_DONTWAIT
    MORE_FOLLOWS = 2  # ZMQ_SNDMORE
    EVENTS = 15  # ZMQ_EVENTS
    READABLE = 1  # ZMQ_POLLIN

cdef void *handle_of(object socket) except NULL
cdef bint is_readable(void *socket) except -1
cdef bytes bytes_of(Message *message)
cdef int send_message(Message *message, void *socket) noexcept
cdef int send_bytes(void *socket, bytes part, int flags) noexcept
