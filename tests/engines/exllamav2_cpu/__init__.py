"""ExLlamaV2's own Python (generator, jobs, page table, sampler, tokenizer) on the CPU, around an oracle for a model.

The package is a pure-Python wheel whose import wants a compiled module. ``extension`` stands in for what the generator,
the sampler and the cache call of it; ``oracle`` for the model. Everything between, and the engine, runs unchanged.
"""
