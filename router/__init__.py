"""The router, which accepts requests and streams tokens. Read `requests/machine.py` first."""
