"""One session per engine, and what it counts and remembers."""
