"""Retrieval quality: short training runs of our losses and the peers', each a JSON; see ``__main__``."""
