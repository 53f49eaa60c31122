"""Plain-torch copies of the served models, for training outside and beside the engine."""
