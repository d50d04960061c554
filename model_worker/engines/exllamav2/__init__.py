"""ExLlamaV2: the engine this product exists for. Nothing is imported here."""
