"""What a hop costs, without the layers that it runs."""
