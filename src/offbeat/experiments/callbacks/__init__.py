"""Observers of a run: summary on disk, JSON lines, TensorBoard, dashboard."""
