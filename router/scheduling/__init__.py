"""Decides which nodes serve a request, and when: the queue and placement."""
