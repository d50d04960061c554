"""Write the generated pages of the repository, or compare them with what would be written.

python -m tools.docs            write them
python -m tools.docs --check    exit with 1 if one of them is out of date, and name it
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from tools.docs.client import client_page
from tools.docs.commands import commands_page
from tools.docs.configuration import configuration_page
from tools.docs.dashboard import dashboard
from tools.docs.decoding_plot import decoding_plot
from tools.docs.errors import error_table
from tools.docs.headlines import readme
from tools.docs.http_errors import http_error_table
from tools.docs.http_options import anthropic_options, http_endpoints, http_options, http_orders, responses_options
from tools.docs.manpage import man_page
from tools.docs.models_schema import models_schema
from tools.docs.request_options import request_options_page
from tools.docs.wire import PARTS

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration_page,
    "request-options.md": request_options_page,
    "commands.md": commands_page,
    "python-client.md": client_page,
    "_generated/errors.md": error_table,
    "_generated/http-errors.md": http_error_table,
    "_generated/http-endpoints.md": http_endpoints,
    "_generated/http-orders.md": http_orders,
    "_generated/http-options.md": http_options,
    "_generated/responses-options.md": responses_options,
    "_generated/anthropic-options.md": anthropic_options,
    "images/decoding.svg": decoding_plot,
    "../deploy/grafana/modelctl.json": dashboard,
    **PARTS,
    "../README.md": readme,
    "../supervisor/cli/models.schema.json": models_schema,
    "../supervisor/cli/modelctl.1": man_page,
}
"""The files below docs/ that are generated and committed. A file below _generated/ is included by a page. Of the README
only the table of figures is generated. The JSON schema of models.yaml and the man page are shipped with the
command line."""


def stale() -> list[str]:
    """Return the names of the committed pages that differ from what their sources would produce now."""
    paths = {name: DOCS / name for name in PAGES}
    return [name for name, path in paths.items() if not path.exists() or path.read_text() != PAGES[name]()]


def main(arguments: list[str]) -> int:
    """Write the pages, or with --check compare them. Returns the exit code."""
    old = stale()
    if arguments == ["--check"]:
        for name in old:
            print(f"{_shown(name)} is out of date: run `python -m tools.docs`, and commit it", file=sys.stderr)
        return 1 if old else 0
    if arguments:
        print(__doc__, file=sys.stderr)
        return 2
    for name in old:
        (DOCS / name).parent.mkdir(exist_ok=True)
        (DOCS / name).write_text(PAGES[name]())
        print(_shown(name))
    return 0


def _shown(name: str) -> str:
    """Return the path of a page from the top of the repository."""
    return os.path.normpath(f"docs/{name}")
