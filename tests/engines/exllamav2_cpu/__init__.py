"""ExLlamaV2's own Python (generator, jobs, page table, sampler, tokenizer) on the CPU, with an oracle as its model.

The package's wheel is pure Python, but its import needs a compiled module. ``extension`` replaces the functions of that
module that the generator, the sampler and the cache call. ``oracle`` replaces the model. All other code of the package
and of the engine runs unchanged.
"""
