"""What of each paper's claims can be checked in virtual time: its figure and ours, side by side."""
