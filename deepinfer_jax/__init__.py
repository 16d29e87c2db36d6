"""Serving of million-token, cross-layer-shared-memory models, as JAX programs and as simulation."""
