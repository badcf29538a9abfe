"""The router: requests in, tokens out. Read `requests/machine.py` first."""
