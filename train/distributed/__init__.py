"""Several processes: sharding, the launcher's settings, signals, messages between processes."""
