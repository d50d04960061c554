"""Write what is generated in the repository, or compare it with what would be written.

python -m tools.docs            write it
python -m tools.docs --check    exit with 1 if something is out of date, and name it

A generated file belongs to its function in FILES. A generated part of a handwritten page stands between two lines with
the part's name in PARTS. So the page is complete for a reader of the file, and a part can move to another page:

    <!-- part: errors -->
    <!-- end: errors -->
"""

import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.docs.client import client_page
from tools.docs.client_methods import async_client
from tools.docs.commands import commands_page
from tools.docs.configuration import configuration_page
from tools.docs.dashboard import dashboard
from tools.docs.decoding_plot import decoding_plot
from tools.docs.errors import error_table
from tools.docs.headlines import readme_figures
from tools.docs.http_errors import http_error_table
from tools.docs.http_options import anthropic_options, http_endpoints, http_options, http_orders, responses_options
from tools.docs.manpage import man_page
from tools.docs.models_schema import models_schema
from tools.docs.performance import performance_page, pictures, result_files
from tools.docs.request_options import request_options
from tools.docs.wire import WIRE_PARTS

DOCS = Path(__file__).resolve().parents[2] / "docs"
FILES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration_page,
    "commands.md": commands_page,
    "python-client.md": client_page,
    "performance.md": lambda: performance_page(result_files()),
    **pictures(),
    "images/decoding.svg": decoding_plot,
    "../deploy/grafana/modelctl.json": dashboard,
    "../modelctl/cli/models.schema.json": models_schema,
    "../modelctl/cli/modelctl.1": man_page,
    "../protocol/client/async_client.py": async_client,
}
"""File below docs/ → the function that makes its text. The JSON schema of models.yaml and the man page are shipped with
the command line. Of the client only the methods for verbs are made."""
PARTS: dict[str, Callable[[], str]] = {
    "figures": readme_figures,
    "errors": error_table,
    "request-options": request_options,
    "http-errors": http_error_table,
    "http-endpoints": http_endpoints,
    "http-orders": http_orders,
    "http-options": http_options,
    "responses-options": responses_options,
    "anthropic-options": anthropic_options,
    **WIRE_PARTS,
}
"""Part of a handwritten page → the function that makes its text."""
_PART = re.compile(r"^<!-- part: ([\w-]+) -->\n(.*?)^<!-- end: ([\w-]+) -->$", re.MULTILINE | re.DOTALL)


def handwritten() -> Iterator[str]:
    """Yield the pages that may have generated parts, by their names below docs/."""
    for path in [*DOCS.parent.glob("*.md"), *DOCS.glob("*.md")]:
        if (name := os.path.relpath(path, DOCS)) not in FILES:
            yield name


def filled(page: str) -> str:
    """Return a page with its parts made anew. Raises ValueError for an unknown part, and for one without its end."""

    def made(match: "re.Match[str]") -> str:
        name, end = match[1], match[3]
        if name not in PARTS or end != name:
            raise ValueError(f"the part {name!r} ends as {end!r}; known parts are {', '.join(PARTS)}")
        return f"<!-- part: {name} -->\n{PARTS[name]().strip()}\n<!-- end: {name} -->"

    if len(_PART.findall(page)) != len(re.findall("^<!-- (?:part|end): ", page, re.MULTILINE)) / 2:
        raise ValueError("a part has no line <!-- end: NAME -->, or an end has no beginning")
    return _PART.sub(made, page)


def unused() -> list[str]:
    """Return the names of the parts that no page has."""
    there = {match[1] for name in handwritten() for match in _PART.finditer((DOCS / name).read_text())}
    return sorted(PARTS.keys() - there)


def stale() -> dict[str, str]:
    """Return the text that each committed file would have, for those that differ from it now."""
    wanted = {name: make() for name, make in FILES.items()}
    wanted |= {name: filled((DOCS / name).read_text()) for name in handwritten()}
    return {
        name: text for name, text in wanted.items() if not (path := DOCS / name).exists() or path.read_text() != text
    }


def main(arguments: list[str]) -> int:
    """Write what is generated, or with --check compare it. Returns the exit code."""
    old = stale()
    if arguments == ["--check"]:
        for name in old:
            print(f"{_shown(name)} is out of date: run `python -m tools.docs`, and commit it", file=sys.stderr)
        return 1 if old else 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    for name, text in old.items():
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(text)
        print(_shown(name))
    return 0


def _shown(name: str) -> str:
    """Return the path of a file from the top of the repository."""
    return os.path.normpath(f"docs/{name}")
