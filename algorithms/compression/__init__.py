"""Compressors and their contraction factors."""
