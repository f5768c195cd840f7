"""Training data, and the types that training, models and evaluation share."""
