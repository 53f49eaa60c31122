"""Decisions on record: what each session's core was given, on disk, and deciding it again.

taped_core  ->  recorder (a thread)  ->  segments on disk  ->  recording  ->  replay, ticket
"""
