"""Data sets, their splits and their cache."""
