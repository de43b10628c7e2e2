"""Mutation testing in a command of its own: `python -m tests.mutation`."""
