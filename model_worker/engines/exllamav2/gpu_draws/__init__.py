"""Draw tokens on the GPU, by a rule of the project's own: the rule, its kernels, and the tables that they read."""
