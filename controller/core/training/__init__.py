"""Plans online training of the drafters."""
