"""One session per engine, and what the sessions share."""
