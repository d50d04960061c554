"""Say why msgpack refused bytes, in the words of the wire protocol.

The exceptions of msgpack itself name classes of Python, or say nothing.
"""

import re

import msgpack

_BEYOND = re.compile(r"(\d+) exceeds max_(array|map|str|bin|ext)_len\((\d+)\)")
_MEASURED = {
    "array": "an array of {} elements",
    "map": "a map of {} pairs",
    "str": "a string of {} bytes",
    "bin": "a bin of {} bytes",
}


def why_refused(error: Exception) -> str:
    """Return why bytes could not be unpacked, without repeating any of them.

    error  the exception that unpacking raised. If it is a plain ValueError that msgpack did not raise, its message is
           returned unchanged
    """
    if isinstance(error, msgpack.FormatError):
        return "not msgpack: it holds the byte 0xc1, which begins no value"
    if isinstance(error, msgpack.StackError):
        return "arrays and maps are nested too deeply"
    if isinstance(error, msgpack.ExtraData):
        return "not one msgpack value: there are more bytes behind the first value"
    if isinstance(error, UnicodeDecodeError):
        return "a string is not UTF-8: send other bytes as a bin"
    message = str(error)
    if isinstance(error, msgpack.OutOfData) or message == "Unpack failed: incomplete input":
        return "not complete msgpack: the bytes end where a value is expected"
    if "is not allowed for map key" in message:
        return "a map has a key that is neither a string nor a bin"
    if (beyond := _BEYOND.fullmatch(message)) is not None:
        found, what, most = beyond.groups()
        if what == "ext":
            return "a value of an extension type, of which this protocol has none"
        return f"{_MEASURED[what].format(found)}: at most {most} are allowed here"
    return message if type(error) is ValueError else "not msgpack of the shape that is expected here"
