"""Weights that this machine lacks: exactly the tensors of a shard, from another node or a hub."""
