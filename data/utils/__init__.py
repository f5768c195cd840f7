"""No machine learning: errors, typed configs, atomic files and manifests, the Hub, progress display."""
