"""The drafters inside SGLang: loading them, running them and letting them idle."""
