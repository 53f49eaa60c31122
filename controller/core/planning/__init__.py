"""Chooses the draft length and the drafter of each batch size from the estimates."""
