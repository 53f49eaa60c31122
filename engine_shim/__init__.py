"""What runs inside, or beside, the engine."""
