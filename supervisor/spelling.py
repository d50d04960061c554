"""Show a value of a file or a request in an error message, as YAML and JSON spell it. Python's spelling differs."""

MOST_SHOWN = 60
"""The most characters of a value that a message repeats. If a value is longer, the message names its type."""


def spelled(value: object) -> str:
    """Return a value as YAML and JSON write it, or its type where that would be long."""
    try:
        shown = _written(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; very deep lists
        shown = ""
    if 0 < len(shown) <= MOST_SHOWN:
        return shown
    if isinstance(value, str):
        return f"a string of {len(value)} characters"
    return "a list" if isinstance(value, list) else "a mapping" if isinstance(value, dict) else "a long number"


def quotes_for(value: object) -> str:
    """Return what to do if a file's value that is no text was meant as text: YAML reads some words as other values."""
    if isinstance(value, bool):
        words = "yes, on and true are true" if value else "no, off and false are false"
        return f"; without quotes, {words} in YAML: put the word into quotes"
    return "; put it into quotes" if isinstance(value, (int, float)) else ""


def spelled_name(name: object) -> str:
    """Return a map's key, shortened. A key from the wire may be a bin, and names are strings."""
    if isinstance(name, bytes):
        return f"{name[:MOST_SHOWN].decode(errors='replace')!r} (a bin, and names are strings)"
    return repr(str(name)[:MOST_SHOWN])


def _written(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_written(key)}: {_written(part)}' for key, part in value.items())}}}"
    if isinstance(value, bytes):
        return f"a bin of {len(value)} byte{'' if len(value) == 1 else 's'}"
    return repr(value)
