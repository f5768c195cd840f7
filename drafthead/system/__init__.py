"""The machine: devices, the load by other processes, and the console."""
