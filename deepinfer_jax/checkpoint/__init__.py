"""Weights in and out: the released safetensors layout, and a native one that restores to a mesh."""
