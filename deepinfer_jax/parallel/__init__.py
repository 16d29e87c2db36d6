"""Ranks of one step: mesh axes, the exchange of experts' rows, and moves of experts' weights."""
