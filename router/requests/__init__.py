"""One request's life: its answer, its attempts, its readers. Read `machine.py` first."""
