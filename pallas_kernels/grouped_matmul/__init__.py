"""Experts' matmuls over rows that are sorted by expert."""
