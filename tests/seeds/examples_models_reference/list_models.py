from scforge.models import list_models

available = list_models()
print(available)
# ['autoregressive_transformer', 'masked_autoencoder', 'transformer_encoder']
