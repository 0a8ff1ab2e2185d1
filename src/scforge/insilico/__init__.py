"""What a trained model says of genes: perturbed cells, gene embeddings, attention, imputed expression.

``Encoder`` has methods for all of it.
"""

__all__: list[str] = []
