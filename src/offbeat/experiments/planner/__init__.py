"""The planner: which strategy, with which settings, reaches the target first on a given cluster."""
