"""Code edits on a paced engine: the drafter of each row against the best single arm."""
