"""Triton kernels, one file an op. Importing this imports nothing; the registry loads the op files."""
