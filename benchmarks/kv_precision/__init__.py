"""What KV caches of 8-bit integers change: of the output, of memory, of the time of a step."""
