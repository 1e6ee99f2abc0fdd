"""What a training or a model is like: its curvature, and telemetry of its steps."""
