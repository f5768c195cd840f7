"""Numbers to people: tables, plots, the HTML page."""
