"""Observability of requests: one record each, from which summaries, metrics, logs, traces and pages are made."""
