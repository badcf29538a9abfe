"""What both ends of a call need: channels, credentials, errors as statuses. No server, no logs, no metrics."""
