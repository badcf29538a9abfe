"""How draft tokens are verified: one file a method; `by_request` takes the one that the request chose."""
