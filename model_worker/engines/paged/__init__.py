"""Paged attention for ExLlamaV2 without flash-attn. This file imports nothing."""
