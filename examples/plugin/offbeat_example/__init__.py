"""Example of a plugin for Offbeat: two strategies, a codec and a task, one file each."""
