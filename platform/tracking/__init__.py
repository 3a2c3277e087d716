"""MLflow: read run folders, send them to a tracking server, serve the UI."""
