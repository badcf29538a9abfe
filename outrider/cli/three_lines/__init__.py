"""`outrider bench --three-lines`: plain decoding, a drafter beside the target, and a drafter across a network."""
