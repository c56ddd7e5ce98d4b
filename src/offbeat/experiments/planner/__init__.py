"""The planner: finds the strategy and settings that reach the target first on a given cluster."""
