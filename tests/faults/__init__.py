"""Fault injection: `python -m tests.faults` runs every row and prints a table."""
