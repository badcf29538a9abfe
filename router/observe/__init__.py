"""Observability: each request has one record, from which summaries, metrics, logs, traces and pages are made."""
