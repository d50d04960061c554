"""Marks for tests of what is compiled, and of the Python beside it."""

import pytest

from protocol.compiled import MODULES, look

MISSING = [f"{name}: {look(name)[1]}" for name in MODULES if look(name)[0] is None]
needs_compiled = pytest.mark.skipif(bool(MISSING), reason="; ".join(MISSING) or "all there")
