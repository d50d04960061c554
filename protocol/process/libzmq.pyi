import zmq

SOURCES: int

def has_input(socket: zmq.Socket[bytes]) -> bool:
    """As ``socket_calls.has_input``, without pyzmq's own part of it."""
