"""libzmq waits when it is ``UNSEEN`` monitor events ahead of a thread that does not read them."""

import subprocess
import sys
from pathlib import Path

from supervisor.ports.sockets import UNSEEN

PROGRAM = """
import logging, os, resource, socket, sys, time
import zmq
from supervisor.ports.descriptors import BACKLOG
from supervisor.ports.listeners import open_ipc_port
from supervisor.ports.sockets import UNSEEN

os.chdir(sys.argv[1])  # its own path may be too long for a socket
path = "port"
come, gone = os.pipe(), os.pipe()
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if os.fork() == 0:
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.read(come[0], 1)
    os.set_blocking(gone[0], False)
    connections = []
    while True:  # until there is no room, and on
        connection = socket.socket(socket.AF_UNIX)
        connection.setblocking(False)
        try:
            connection.connect(path)
            connections.append(connection)
        except OSError:  # no room, or nobody listens any more
            time.sleep(0.001)
        try:
            os.read(gone[0], 1)
            os._exit(0)
        except BlockingIOError:
            pass

def taken():
    return len(os.listdir("/proc/self/fd"))

context = zmq.Context()
port, _ = open_ipc_port(context, "ipc://" + path, BACKLOG, lambda channel, request: False, logging.getLogger())
before = taken()
allowed = before + UNSEEN + 8
resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
os.write(come[1], b"x")
most = [before]
deadline = time.monotonic() + 30
while time.monotonic() < deadline and (len(most) < 50 or most[-1] > most[-50] or most[-1] < 500):
    most.append(taken())
    time.sleep(0.01)
print(most[-1] - before)
os.rename(path, path + ".away")
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
while time.monotonic() < deadline and port.counters.accepted <= UNSEEN:
    port.read_monitor()
    time.sleep(0.001)
print(port.counters.accepted)
os.write(gone[1], b"x")
os.wait()
time.sleep(0.1)  # by now it is told of the ends of more than it can tell us
port.close()
context.term()
"""


def test_as_many_as_are_reserved_and_no_more_and_their_ends_do_not_block_ours(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    taken, accepted = map(int, done.stdout.split())
    assert 500 < taken <= UNSEEN + 1, "it waits for us, and would have come to the end of the descriptors"
    assert accepted > UNSEEN, "and goes on when it is looked at again"
