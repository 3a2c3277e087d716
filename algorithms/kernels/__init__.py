"""Fused array operations and top-k selection for rows of many entries."""
