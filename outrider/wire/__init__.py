"""Proto ⇄ domain, one file for each proto. Nothing here decides anything."""
