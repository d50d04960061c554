import zmq

SOURCES: int

def has_input(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message can be received now, without the cost of pyzmq's wrapper."""
