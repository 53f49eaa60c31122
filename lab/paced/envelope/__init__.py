"""The published envelope of two drafters, run on a paced engine, and steered on top of it."""
