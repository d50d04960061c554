"""The embedded engine: transformers models in float32, on the CPU by default. Nothing is imported here."""
