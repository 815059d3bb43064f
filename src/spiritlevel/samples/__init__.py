"""One number for every sample: the trace of its Hessian, its margins."""
