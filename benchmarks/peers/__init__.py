"""meshnet beside other systems, on one machine in one run."""
