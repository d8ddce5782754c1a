"""Other engines, each run as a script by its own Python: see `inferjax.bench.rivals`.

The scripts import nothing of inferjax (but its own) and print one JSON object: a speed for every
shape of the measurement, or nothing for shapes that the engine does not run.
"""
