"""The RPC code that clients and servers share: channels, credentials, and errors as statuses. No server, logs or
metrics.
"""
