"""Tests, in the tree of the packages; tests/faults is the fault harness."""
