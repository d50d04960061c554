"""Generators of the documentation site. ``tools.docs.pages`` lists what they make."""
