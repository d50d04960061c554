"""Generators of the documentation site. ``tools.docs.pages`` lists the pages that they make."""
