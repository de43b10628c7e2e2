"""Random faults under load."""
