"""What a trained model says of genes: perturbed cells, gene embeddings, attention, imputed expression."""
