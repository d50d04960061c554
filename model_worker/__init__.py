"""One model in one process: the loop, the engine interface, the engines. Only engine modules import torch."""
