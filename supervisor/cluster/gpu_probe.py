"""A program that reads the GPUs of a machine of the cluster once, for the supervisor's status, and leaves.

Ray runs it on machines where no worker with GPUs reports them. It writes one msgpack map to its standard output:
``gpus``, a list of [index, UUID, total, used and free bytes], or null if they cannot be read.
"""

import os
import sys

from protocol.codec import pack_body
from protocol.process.birth import die_with
from supervisor.placement.gpu_reader import read_once
from supervisor.placement.gpus import GpusUnknown


def main() -> None:
    """Write what the GPUs hold."""
    if not die_with(os.getppid()):
        return
    try:
        gpus = [[gpu.index, gpu.uuid, gpu.total, gpu.used, gpu.free] for gpu in read_once()]
    except GpusUnknown:
        gpus = None
    sys.stdout.buffer.write(pack_body({"gpus": gpus}))


if __name__ == "__main__":
    main()
