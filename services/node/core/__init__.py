"""The decisions of a node: what may run, what runs next, who has room. No clock, no waiting, no torch."""
