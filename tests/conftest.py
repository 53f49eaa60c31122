"""What all tests share."""

from hypothesis import settings

# Two busy cores make any single example slow at times; the number of examples is the budget.
settings.register_profile("default", deadline=None)
settings.load_profile("default")
