"""Engine embedding: vectors of texts, and scores of documents. Not to be confused with ``engines.embedded``."""
