"""Holds what the parts of the plugin share: SGLang names and facts, settings, errors, hooks."""
