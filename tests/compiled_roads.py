"""A mark for tests that need the compiled modules."""

import pytest

from protocol.process.compiled import load_compiled
from supervisor.workers.environment import MODULES

MISSING = [f"{name}: {load_compiled(name)[1]}" for name in MODULES if load_compiled(name)[0] is None]
needs_compiled = pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING) or "all there")
