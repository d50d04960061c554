"""Configuration, life cycle, scheduling, processes, the loop, the command line. Never imports torch, never
unpickles."""
