"""Run blocks of nodes in this process or in Ray actors, and evaluate them."""
