"""The open-loop load generator, against any server."""
