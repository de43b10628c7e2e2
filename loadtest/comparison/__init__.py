"""Comparisons of Tandem with other engines, servers and load clients on one machine."""
