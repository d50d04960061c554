"""What two processes of modelctl must agree on: messages, limits, errors, requests, and the client's end of it.

Internal. Programs import the clients from ``modelctl``.
"""

__version__ = "0.1.0"
"""The version of the distribution. It stands here, because every process needs it and this package imports no other;
people find it as ``modelctl.__version__``."""
