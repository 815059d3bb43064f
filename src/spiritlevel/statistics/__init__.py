"""Correlations, outliers, and the error of having measured a subset."""
