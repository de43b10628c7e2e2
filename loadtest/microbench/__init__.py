"""Measurements of one part of the product."""
