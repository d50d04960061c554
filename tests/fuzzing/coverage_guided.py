"""Search with atheris (libFuzzer) for frames that reach new branches in the product's decoders.

    python -m tests.fuzzing.coverage_guided DIRECTION [libFuzzer's options] CORPUS_DIRECTORY

An exception other than WireError ends the search, and its frame is written to a file crash-*. ``benchmarks.fuzzing``
runs this module.
"""

import sys

import atheris

# Only the product's modules are instrumented, not their dependencies.
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
