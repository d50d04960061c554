"""Print the requirements of an extra of pyproject.toml, one on each line, for ``pip install -r``.

python tools/extra.py NAME
"""

import sys
import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    print(*project["optional-dependencies"][sys.argv[1]], sep="\n")
