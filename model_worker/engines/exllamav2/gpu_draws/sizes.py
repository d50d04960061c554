"""Sizes of the draws' buffers. No torch: the estimate of memory reads them, too."""

BLOCK = 4096
"""Ids that one program reads."""
MOST = 4096
"""The most candidates of a row that are gathered. Rows with more take the slow way."""
BINS = 4096
"""Bins in which the weights of such a row are counted and summed."""
LEVELS = 8
"""Thresholds of weights, each a sixteenth of the one before."""
WORDS = 24
"""int32 numbers that the host writes for each row; ``kernels`` says which."""
