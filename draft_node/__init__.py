"""The draft node: committed tokens in, proposals out."""
