"""Paged attention for ExLlamaV2 without flash-attn. Nothing is imported here."""
