"""What workers tell each other: settings, failures, signals and backups."""
