"""Measurements. Most modules are commands of their own. The result files are in ``results``."""

import os

# Let Python keep compiled modules, as for an installed package. Otherwise each measured process compiles them anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
