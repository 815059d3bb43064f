"""Correlations, outliers, and the error due to measuring a subset."""
