"""The router: requests in, tokens out. Read `request_flow.py` first."""
