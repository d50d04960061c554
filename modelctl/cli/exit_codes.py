"""Exit codes of ``modelctl``. Those from 64 on are sysexits(3)."""

OK = 0
"""Done."""
FAILED = 1
"""A model or request ended with an error; the message says which."""
USAGE = 2
"""Wrong options or arguments."""
NO_ROOM = 3
"""The models do not fit on the GPUs (`modelctl plan`)."""
UNAVAILABLE = 69
"""No supervisor is running here, or the connection to it was lost."""
SOFTWARE = 70
"""A fault of modelctl itself."""
TEMPFAIL = 75
"""Another supervisor is already running here."""
NOPERM = 77
"""Over TCP: the supervisor does not admit the key, or the key does not have the right."""
CONFIG = 78
"""models.yaml, or the environment, cannot be used as it is."""
INTERRUPTED = 130
"""Ended by Ctrl-C."""
