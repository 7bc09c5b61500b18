"""How fast a mesh would be, before its machines exist. Pure: the tracker's planner is asked by the command line."""
