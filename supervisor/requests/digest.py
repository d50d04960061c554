"""Make short digests of long byte strings, which only have to be recognized again. Pure."""

try:
    # hashlib has the same function, but also loads OpenSSL. That takes 3.5 MB and 12 ms, and nothing here needs it.
    from _blake2 import blake2b
except ImportError:  # this Python was built without the module
    from hashlib import blake2b


def digest(content: bytes, key: bytes = b"") -> bytes:
    """Return the digest of ``content``, 16 bytes. Another ``key`` (at most 64 bytes) makes another digest."""
    return blake2b(content, digest_size=16, key=key).digest()
