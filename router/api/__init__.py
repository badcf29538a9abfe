"""The public API: services, validation, clients, pages."""
