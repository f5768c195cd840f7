"""The token tree for this head and machine: simulated acceptance, measured costs, search."""
