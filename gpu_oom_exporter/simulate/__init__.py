"""A simulated host: readers for the same protocols as `sources/`, so that everything above them is real."""
