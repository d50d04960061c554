"""Measurements: each module is a command of its own; results are kept in ``results``."""

import os

# What is measured finds its modules compiled, as an installed package's are: else each process compiles them anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
