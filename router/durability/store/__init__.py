"""Where requests with a resume window are kept. Read base.py first."""
