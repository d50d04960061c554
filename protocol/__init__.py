"""The contract between two processes of modelctl: messages, limits, errors and requests.

``protocol.client`` is the client's end of a connection. ``protocol.process`` is what the processes of a machine share.
All of it is internal: programs import the clients from ``modelctl``.
"""

__version__ = "0.1.0"
"""The version of the distribution, which programs read as ``modelctl.__version__``. This package defines the version,
because every process needs it and importing this package imports no other package."""
