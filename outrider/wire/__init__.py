"""Proto ⇄ domain conversions, one file per proto. No decisions are made here."""
