"""What every service process is made of: life cycle, channels, health, reflection, telemetry. Torch-free."""
