"""The compiled steps: the only folder that calls `jax.jit`."""
