"""What makes the second save cheap: what the state was made of, how it lay, and what did not change."""
