"""How long large bodies hold the event loop of a router."""
