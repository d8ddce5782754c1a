"""The inference engine you can jit, vmap, grad and shard."""
