"""Plays the day of the demo at a GPU's own pace: acceptance is drawn, and step times are real."""
