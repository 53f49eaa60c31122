"""Paces the real SGLang: every step lasts as long as a published cost model says."""
