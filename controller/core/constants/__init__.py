"""The constants of the decision, as settings: one class for each part of the core."""
