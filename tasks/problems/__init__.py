"""Tasks: the problems that experiments can name, with their oracles."""
