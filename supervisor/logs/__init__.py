"""The log of the supervisor, and those of the models."""
