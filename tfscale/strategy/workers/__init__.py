"""Messages between workers: settings, failures, signals and backups."""
