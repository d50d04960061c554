"""What ``modelctl`` returns to the shell. Those from 64 on are sysexits(3)."""

OK = 0
FAILED = 1
"""A model or request ended with an error; the message says which."""
USAGE = 2
"""Wrong options or arguments (click's own)."""
NO_ROOM = 3
"""The models do not find room on the GPUs (plan)."""
UNAVAILABLE = 69
"""No supervisor is running here, or the connection to it was lost."""
SOFTWARE = 70
"""A fault of modelctl itself."""
TEMPFAIL = 75
"""Another supervisor is already running here."""
NOPERM = 77
"""Over TCP: the key is not admitted, or has not the right."""
CONFIG = 78
"""models.yaml, or the environment, is not usable as it is."""
INTERRUPTED = 130
"""Ended by Ctrl-C."""
