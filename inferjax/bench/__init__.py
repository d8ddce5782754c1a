"""Measurements, each shown beside the limit of the machine it ran on."""
