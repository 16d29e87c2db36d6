"""Kernels: one directory per operation, none yet."""
