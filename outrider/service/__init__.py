"""The parts of every service process: life cycle, channels, health, reflection, telemetry. It imports no torch."""
