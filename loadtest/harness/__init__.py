"""Shared by all measurements: processes of the product, statistics, peaks of the machine, reports and plots."""
