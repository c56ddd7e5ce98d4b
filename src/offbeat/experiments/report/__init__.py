"""Reports: from the folders of runs to means and spreads, and to one page that needs no network."""
