"""Engines: run blocks of nodes in this process or as Ray actors, and evaluate them."""
