"""Integrations: Offbeat in the trainers that people have. No framework is imported unless its file is."""
