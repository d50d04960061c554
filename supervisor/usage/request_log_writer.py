"""The program that writes the request log. It may wait for the disk.

    python -P -m supervisor.usage.request_log_writer FILE

FILE    the log
stdin   the link to the supervisor (``helper_link``), which sends the lines. The program says in JSON why the file
        cannot be written, and null when it can be written again

When the supervisor ends, however it ends, the link ends. Then the program writes the lines that are left, and leaves.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Final

from protocol.process.helper_link import become_helper, serve
from supervisor.logs.files import LogFile

MAX_BYTES: Final = 64 << 20
"""A larger log is renamed to NAME.1, and the one that had this name is lost: some 150,000 lines are kept."""


class RequestLogFile(LogFile):
    """The file of the request log."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, MAX_BYTES, lambda line: None)

    def format(self, record: logging.LogRecord) -> str:
        return str(record.msg)

    def lost_lines(self, missing: int, why: str) -> str:
        """Return the line that says how many lines are missing."""
        return json.dumps({"time": round(time.time(), 3), "lost": missing, "reason": why})


def main(arguments: list[str]) -> None:
    link = become_helper("request log writer", dies=False)
    os.umask(0o077)
    file, told = RequestLogFile(Path(arguments[0])), False

    def write(line: bytes) -> None:
        nonlocal told
        file.emit(logging.makeLogRecord({"msg": line.decode(errors="replace")}))
        trouble = file.trouble
        if (trouble is not None) != told:
            told = trouble is not None
            link.send(json.dumps(trouble).encode())

    serve(link, write)


if __name__ == "__main__":
    main(sys.argv[1:])
