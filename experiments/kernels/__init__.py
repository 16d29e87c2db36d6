"""What the TPU compiler says about kernels: its schedules and programs, read."""
