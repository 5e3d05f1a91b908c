"""Fast kernels for mxref's ops. None are here yet: every op runs its reference."""
