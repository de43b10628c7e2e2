"""Measurements of a whole cluster under load, abuse and faults."""
