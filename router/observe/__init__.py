"""What people see of requests: figures, timelines, traces."""
