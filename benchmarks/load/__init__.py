"""Load generators of others, against a gateway."""
