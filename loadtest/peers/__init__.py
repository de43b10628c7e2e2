"""Tandem beside other engines and servers, in one series on one machine. `python -m loadtest.peers` runs it."""
