"""What other engines load to get drafts from draft nodes. Imports neither torch nor the engine."""
