"""Small trained models for the CPU engine, and the scripts that make them again."""
