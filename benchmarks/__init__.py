"""One script a question; `hosts` makes the cluster that they are run on."""
