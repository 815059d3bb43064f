"""Curvature matrices of a data set, known by their products with vectors."""
