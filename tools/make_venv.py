"""Make a virtual environment with pip, also where Debian's python3-venv is not installed.

    python3 tools/make_venv.py DIR

Debian and Ubuntu ship Python without ensurepip unless python3-venv is installed, and `python3 -m venv` then fails. In
that case the environment is made without pip, and pip's own wheel is fetched from the package index (PIP_INDEX_URL,
by default PyPI), checked against the index's hash, and asked to install itself. Standard library only.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.parse
import urllib.request
import venv
from pathlib import Path

INDEX = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/")


def main(directory: Path) -> None:
    try:
        import ensurepip  # noqa: F401

        venv.create(directory, with_pip=True, symlinks=True)
    except (ImportError, subprocess.CalledProcessError, OSError) as e:
        print(f"no ensurepip here ({type(e).__name__}): fetching pip from {INDEX}", flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        venv.create(directory, with_pip=False, symlinks=True)
        install_pip(directory / "bin" / "python")


def install_pip(python: Path) -> None:
    """Fetch the newest pip wheel and install it with itself."""
    # The HTML form of the index (PEP 503) is the one that every mirror has.
    with urllib.request.urlopen(f"{INDEX}/pip/", timeout=60) as response:
        page = response.read().decode()
    links = re.findall(r'href="([^"#]*/(pip-[^/"#]+-py3-none-any\.whl))#sha256=([0-9a-f]{64})"', page)
    if not links:
        raise SystemExit(f"{INDEX}/pip/ lists no wheel of pip; install python3-venv, or set PIP_INDEX_URL")
    link, filename, sha256 = max(links, key=lambda found: version(found[1]))
    with urllib.request.urlopen(urllib.parse.urljoin(f"{INDEX}/pip/", link), timeout=60) as response:
        content = response.read()
    if hashlib.sha256(content).hexdigest() != sha256:
        raise SystemExit(f"{filename}: what was downloaded does not match the index's hash")
    with tempfile.TemporaryDirectory() as scratch:
        wheel = Path(scratch) / filename
        wheel.write_bytes(content)
        command = [str(python), f"{wheel}/pip", "install", "--no-index", "--disable-pip-version-check", str(wheel)]
        subprocess.run(command, check=True)


def version(filename: str) -> tuple[int, ...]:
    """Return (26, 1) for pip-26.1-py3-none-any.whl; pre-releases sort below everything."""
    parts = filename.split("-")[1].split(".")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
