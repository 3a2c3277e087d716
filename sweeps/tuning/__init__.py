"""Search step sizes for presets, with the same budget for every algorithm."""
