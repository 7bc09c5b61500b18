"""A simulator of a mesh under churn, on a virtual clock: the real tracker beside what decentralised systems do."""
