"""Row formats shared by kernels, cache and model; kernels will stand beside them, one folder each."""
