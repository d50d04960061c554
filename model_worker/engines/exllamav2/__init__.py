"""The engine that computes models with ExLlamaV2. This file imports nothing."""
