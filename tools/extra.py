"""What an extra of pyproject.toml asks for, a line each, as ``pip install -r`` reads it.

python tools/extra.py NAME
"""

import sys
import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    print(*project["optional-dependencies"][sys.argv[1]], sep="\n")
