"""Shows a simulation: tables for a terminal, one page with plots."""
