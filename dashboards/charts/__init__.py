"""Chart data: curves, sensitivity panels, per-node charts."""
