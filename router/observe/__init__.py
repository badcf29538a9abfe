"""What people see of requests: one record of each, from which summaries, metrics, logs, traces and pages are made."""
