"""Start processes that read a question as JSON from their standard input. It lies in memory, and never on a disk.

An answer is a file in memory, too, which is read when the process has ended. A pipe could fill, or be left half read.
"""

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any


def question_file(question: Any) -> int:
    """Return a descriptor from which a question is read as JSON. Raises OSError."""
    descriptor = os.memfd_create("question", os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(json.dumps(question).encode())
        os.lseek(descriptor, 0, os.SEEK_SET)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def start_asked(
    command: Sequence[str], question: Any, env: Mapping[str, str], cwd: str | None = None
) -> "tuple[subprocess.Popen[bytes], int]":
    """Start a process, in a session of its own, that answers a question. Return it, and the descriptor that has its
    answer when it has ended. Raises OSError."""
    stdin = question_file(question)
    stdout = -1
    try:
        stdout = os.memfd_create("answer", os.MFD_CLOEXEC)
        process = subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, env=env, cwd=cwd, start_new_session=True
        )
    except OSError:
        if stdout >= 0:
            os.close(stdout)
        raise
    finally:
        os.close(stdin)
    return process, stdout
