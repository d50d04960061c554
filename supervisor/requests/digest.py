"""What stands for many bytes where they are only to be known again. Pure."""

try:
    # As hashlib has it; but that loads OpenSSL beside, which takes 3.5 MB and 12 ms, and is needed for nothing here.
    from _blake2 import blake2b
except ImportError:  # a Python that keeps it elsewhere
    from hashlib import blake2b


def digest(content: bytes, key: bytes = b"") -> bytes:
    """16 bytes. key: at most 64 bytes that make it another one."""
    return blake2b(content, digest_size=16, key=key).digest()
