"""What users ask: measure one model, compare two, audit, look at the surface, watch a training run."""
