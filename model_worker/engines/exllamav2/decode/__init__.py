"""A decode step as one launch: captured CUDA graphs, and a loop that queues the next step before it reads the last."""
