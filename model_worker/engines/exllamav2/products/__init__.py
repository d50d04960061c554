"""Products with quantised matrices on tensor cores: kernels of this project in place of the package's."""
