"""Programs of other people ask the gateway, headless and without a network: ``make test-agents``.

``python -m tests.agents`` makes an environment for each lock file below ``locks/``, enters a network namespace that
holds only loopback, and runs the tests there. ``programs/`` holds what the packages' own environments run.
"""
