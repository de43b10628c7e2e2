"""Random faults under load: `python -m loadtest.chaos`; see loadtest/chaos/__main__.py."""
