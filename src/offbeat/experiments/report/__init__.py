"""The report: runs on disk, aggregated over seeds, as one HTML page."""
