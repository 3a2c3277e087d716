"""Runs: schema and files of a run folder, checkpoints, resume, recovery, comparisons."""
