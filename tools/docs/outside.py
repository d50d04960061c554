"""Find the addresses on other machines from which a page of the site would make a browser load something."""

from html.parser import HTMLParser

_LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "link": "href"}
"""Tags that make a browser load something, with the attribute that holds its address."""


def outside(html: str) -> list[str]:
    """Return the addresses that a page loads from other machines. A script that the theme would fetch counts, too."""
    reader = _Reader()
    reader.feed(html)
    return reader.found


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        where = given.get(_LOADED.get(tag, "")) or ""
        if where.startswith(("http://", "https://", "//")) and given.get("rel") not in ("canonical", "prev", "next"):
            self.found.append(where)
        if "mermaid" in (given.get("class") or "").split():
            self.found.append("mermaid (draw the picture as SVG instead)")  # the theme fetches its script from a CDN
