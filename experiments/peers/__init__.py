"""Adapters for other simulators; each is a script for the interpreter that has its package."""
