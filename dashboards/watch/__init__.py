"""The live page of running experiments."""
