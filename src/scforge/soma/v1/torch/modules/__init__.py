"""Parts of the model: encoder, layer, attention, feed-forward block."""
