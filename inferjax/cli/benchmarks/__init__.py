"""The kinds of `inferjax bench`, one module each: add_arguments(parser) and measure(args)."""
