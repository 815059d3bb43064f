"""One number of every sample: traces of its Hessian, margins."""
