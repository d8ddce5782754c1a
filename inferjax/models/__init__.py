"""Model families and the one decoder that runs them all."""
