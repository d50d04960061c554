"""The project's own rule for drawing a token: docs/engines.md, "How a token is drawn"."""
