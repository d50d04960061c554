"""Config, lifecycle, scheduling, processes, the loop, the command line. Never imports torch, never unpickles."""
