"""The service with times instead of tensors."""
