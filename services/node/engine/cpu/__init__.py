"""What a CPU runs faster than a chain of torch's small operations: compiled loops over bfloat16."""
