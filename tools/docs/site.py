"""Hook of the site's build (mkdocs.yml names this file): allow nothing from other machines.

MkDocs counts warnings in the log, and a strict build fails if there is one.
"""

import logging

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.pages import Page

from tools.docs.outside import outside

log = logging.getLogger("mkdocs.hooks.site")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Warn of everything that a reader's browser would fetch from another machine."""
    for address in outside(output):
        log.warning("%s loads %s: keep it in docs/, since the site works offline", page.file.src_uri, address)
    return output
