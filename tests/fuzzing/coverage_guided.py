"""Frames that atheris (libFuzzer) finds by the branches that they reach in the product's decoders.

    python -m tests.fuzzing.coverage_guided DIRECTION [libFuzzer's options] CORPUS_DIRECTORY

Whatever is raised that is no WireError ends it, with the frame in a file crash-*. ``benchmarks.fuzzing`` runs it.
"""

import sys

import atheris

# Instrumented are the modules that read frames, and not what they are built on.
with atheris.instrument_imports(include=["protocol", "supervisor"]):
    from protocol.errors import WireError
    from tests.fuzzing.receivers import receiver


def main(direction: str) -> None:
    receive = receiver(direction)

    def one(frame: bytes) -> None:
        try:
            receive(frame)
        except WireError:
            pass

    atheris.Setup([sys.argv[0], *sys.argv[2:]], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1])
