"""The HTTP gateway: OpenAI's API, and a page to look at, in a process of its own.

The gateway is a client of the supervisor like any other. It imports ``protocol`` and nothing else of modelctl.
"""
