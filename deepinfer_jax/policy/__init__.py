"""Placement decisions as branch-free functions of a view of the cluster."""
