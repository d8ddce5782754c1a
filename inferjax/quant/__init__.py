"""Weight formats, and the one entry through which every matmul reads a weight."""
