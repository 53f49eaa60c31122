"""Shows a simulation: JSON for programs, tables for a terminal, one page with plots."""

from controller.simulation.report.bars import Bar, bars
from controller.simulation.report.html import render_html
from controller.simulation.report.json_text import from_json, to_json, to_values
from controller.simulation.report.text import render_text

__all__ = ["Bar", "bars", "from_json", "render_html", "render_text", "to_json", "to_values"]
