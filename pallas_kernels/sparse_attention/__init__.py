"""Attention over selected FP4 rows of paged global memory."""
