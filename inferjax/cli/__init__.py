"""The command line: thin host loops that print; the only place that reads environment variables."""
