"""READ FIRST. One request's life: its answer, its attempts, its readers."""
