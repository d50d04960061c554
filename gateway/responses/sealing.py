"""Encrypt reasoning, so that a client can send it back without being able to read or change it.

A client asks for that with ``include: [reasoning.encrypted_content]``. Each text is encrypted and authenticated with
XChaCha20-Poly1305 of libsodium, under a key of this supervisor. It is bound to the caller's key and to the model: for
any other caller and model it is as good as a text that somebody else has encrypted.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from importlib.util import find_spec
from typing import Final

import orjson

PREFIX: Final = "mctl1."
"""The beginning of an ``encrypted_content`` of this gateway. Another way to encrypt would have another one."""


def can_seal() -> bool:
    """Return whether the package that encrypts is installed."""
    return find_spec("nacl") is not None


class Sealer:
    """Encrypts and decrypts the reasoning of one caller and one model.

    secret  32 bytes, known to the gateways of one supervisor
    owner   the id of the caller's key; None if the gateway asks for no keys
    model   the name of the model, as the sender has written it
    """

    def __init__(self, secret: bytes, owner: str | None, model: str) -> None:
        self._secret = secret
        self._about = orjson.dumps([owner, model])

    def seal(self, text: str) -> str:
        """Return the encrypted text. It has a random nonce of 192 bits, so that the secret need not change."""
        from nacl.secret import Aead  # here, because few clients ask for it, and the import takes time

        return PREFIX + urlsafe_b64encode(bytes(Aead(self._secret).encrypt(text.encode(), self._about))).decode()

    def unseal(self, sealed: str) -> str | None:
        """Return the text in the result of ``seal``. None if it is foreign: of another supervisor, caller or model."""
        if not sealed.startswith(PREFIX) or not can_seal():
            return None
        from nacl.exceptions import CryptoError
        from nacl.secret import Aead

        try:
            data = urlsafe_b64decode(sealed.removeprefix(PREFIX).encode())
            return bytes(Aead(self._secret).decrypt(data, self._about)).decode()
        except (ValueError, CryptoError):  # also text that is no base64, and data that is shorter than its nonce
            return None
