"""Configuration, life cycle, scheduling, processes, the loop, the command line. No module of this package imports torch
or unpickles data."""
