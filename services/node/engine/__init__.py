"""The part of a node that knows torch. The rest of the node hands it work as services.node.core.work defines it."""
