"""Effects of genetic and chemical perturbations: reading, prediction and metrics."""
