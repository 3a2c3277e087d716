"""Compiled kernels for sparse documents."""
