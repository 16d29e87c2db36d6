"""The engine that serves: requests, plans of steps, verification, loops."""
