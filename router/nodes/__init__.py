"""The router's view of nodes: links, sessions, the directory."""
