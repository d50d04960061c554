cdef enum:
    MOST_EVENTS = 256  # of a frame that may take the fast path
    MOST_BYTES = 65536

cdef struct Entry:
    unsigned long long request, seq, flags, tokens, length

cdef struct Frame:
    unsigned long long channel, generation
    Py_ssize_t count
    const unsigned char *body
    Entry entries[MOST_EVENTS]

cdef class RequestProgress:
    cdef public object phase, ids
    cdef public unsigned long long sent, delivered_tokens, unpaid
    cdef public long long credit
    cdef public bint resumable, has_tokens, holds
    cdef public double first_token
    cdef readonly object counters
    cdef unsigned long long *completion  # the number in ``counters`` that counts tokens of answers; NULL without them
    cdef unsigned long long last_frame  # the number of the last frame in which ``fits`` has seen it

cdef class FastPath:
    cdef void *streams[MOST_EVENTS]
    cdef Frame frame
    cdef bint begins  # whether the last frame that fitted has the first token of a request
    cdef dict running
    cdef unsigned long long generation
    cdef int of(self, object worker_slot) except -1
    cdef bint fits(self, const unsigned char *data, size_t size) except -1
    cdef unsigned long long passed(self, double now) except? 0xFFFFFFFFFFFFFFFF
