"""Analyses of genes with a trained model: in silico perturbation, gene embeddings, attention, imputation.

``Encoder`` has methods for all of these analyses.
"""

__all__: list[str] = []
