"""Marks for tests of what is compiled, and of the Python beside it."""

import pytest

from protocol.process.compiled import MODULES, load_compiled

MISSING = [f"{name}: {load_compiled(name)[1]}" for name in MODULES if load_compiled(name)[0] is None]
needs_compiled = pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING) or "all there")
