"""Weights in: the file formats, the catalog, and loading."""
