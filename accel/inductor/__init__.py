"""The reference's block code compiled for the CPU by torch.compile: C++ with SIMD and OpenMP, every bit the same."""
