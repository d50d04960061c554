"""Write the methods of ``AsyncClient`` for verbs: those of ``Client``, with ``async`` and ``await``.

They stand in the source between two lines, so that people and type checkers see plain methods. They are written before
``tools.docs`` imports the clients.
"""

import re
from pathlib import Path
from typing import Final

CLIENTS: Final = Path(__file__).resolve().parents[2] / "protocol" / "client"
BEGIN: Final = "    # --- verbs: `python -m tools.docs` writes these methods into async_client.py, too"
END: Final = "    # --- end of the verbs"


def async_client() -> str:
    """Return the text of ``async_client.py`` with these methods made anew. Raises ValueError for a line that is too
    long there: break it in ``sync_client.py``, too."""
    methods = _between((CLIENTS / "sync_client.py").read_text())
    made = re.sub(r"^    def ", "    async def ", methods, flags=re.MULTILINE).replace("self._ask(", "await self._ask(")
    if long := [line for line in made.splitlines() if len(line) > 120]:
        raise ValueError(f"too long for async_client.py: {long[0].strip()}")
    text = (CLIENTS / "async_client.py").read_text()
    return text.replace(_between(text), made)


def write() -> None:
    """Write ``async_client.py``, if it is out of date, and print its name."""
    path, made = CLIENTS / "async_client.py", async_client()
    if path.read_text() != made:
        path.write_text(made)
        print(path.relative_to(CLIENTS.parents[1]))


def _between(text: str) -> str:
    return text[text.index(BEGIN) : text.index(END)]
