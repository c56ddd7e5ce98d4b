"""What every strategy must show. A strategy joins by one line in `table.py`."""
