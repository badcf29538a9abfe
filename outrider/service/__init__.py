"""The parts that all service processes share: life cycle, channels, health, reflection, telemetry. Torch-free."""
