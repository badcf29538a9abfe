"""What the router knows of nodes: links, sessions, the directory."""
