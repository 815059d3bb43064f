"""What a forward pass does: the operations that run, their degrees, norms, paths and layers."""
