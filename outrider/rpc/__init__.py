"""The RPC code that clients and servers share: channels, credentials, and the conversion of errors to statuses. It
contains no server, logs or metrics.
"""
