"""The model: pure functions over a parameter tree and a cache memory."""
