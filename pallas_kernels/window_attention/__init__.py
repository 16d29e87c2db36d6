"""Attention over the rows of a sliding window, with a sink."""
