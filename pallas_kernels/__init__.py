"""Row formats shared by kernels, cache and model, and kernels that use them, one folder per op."""
