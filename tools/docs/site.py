"""Hooks of the site's build (mkdocs.yml names this file): add generated pages, and allow nothing from other machines.

MkDocs counts warnings in the log, and a strict build fails if there is one.
"""

import logging

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from benchmarks.report import RESULTS
from tools.docs.outside import outside
from tools.docs.performance import performance_page, result_files

log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the performance page, and the result files that it links to."""
    results = result_files()
    files.append(File.generated(config, "performance.md", content=performance_page(results)))
    for name in results:
        path = f"results/{name}.json"
        files.append(File.generated(config, path, content=(RESULTS / f"{name}.json").read_text()))
    return files


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warn of everything that a reader's browser would fetch from another machine."""
    for address in outside(output):
        log.warning("%s loads %s: keep it in docs/, since the site works offline", page.file.src_uri, address)
    return output
