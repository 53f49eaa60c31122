"""Shows a simulation: JSON for programs, tables for a terminal, one page with plots."""

from simulator.report.bars import Bar, bars
from simulator.report.html import render_html
from simulator.report.text import render_text
from simulator.results import from_json, to_json, to_values

__all__ = ["Bar", "bars", "from_json", "render_html", "render_text", "to_json", "to_values"]
