"""The module of ``gateway`` that the supervisor starts. No other file of the supervisor names that package."""

import sys
from typing import Final

GATEWAY: Final = (sys.executable, "-P", "-m", "gateway")
"""The program of a gateway process. It reads its settings (``protocol.process.gateway_settings``) from standard input.
With -P, Python imports no json.py from the current directory."""
