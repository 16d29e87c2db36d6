"""Command lines, one screen each; configs/ are their data."""
