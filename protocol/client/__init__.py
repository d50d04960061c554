"""The client's end of a connection to the supervisor: what programs import from ``modelctl``.

Modules here may import the contract (the modules of ``protocol`` itself) and ``protocol.process``.
"""
