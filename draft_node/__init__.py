"""The draft node, which receives committed tokens and answers with proposals."""
