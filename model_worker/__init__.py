"""The worker, which serves one model in one process: loop, engine interface, engines. Only engines import torch."""
