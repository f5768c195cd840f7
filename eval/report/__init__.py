"""Presentation of results: tables, plots, the HTML page."""
