"""Who asks, for what, and whether they may: the public services, validation, clients, pages."""
