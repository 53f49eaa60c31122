"""The adaptive speculation controller: how far should an LLM engine speculate, right now?"""

__version__ = "0.1.0"
