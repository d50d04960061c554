"""GPUs and their memory: the needs of models, placement, eviction, and the memory of dead workers."""
