"""The embedded engine: transformers models in float32, on the CPU by default. This file imports nothing."""
