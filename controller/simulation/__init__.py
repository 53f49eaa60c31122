"""The proof: a decode engine in virtual time that drives the production core, and every peer."""
