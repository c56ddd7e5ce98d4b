"""Live: a run as it goes on, for people and for programs."""
