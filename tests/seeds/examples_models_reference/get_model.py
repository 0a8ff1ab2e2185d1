from scforge.models import get_model
from scforge.config.schema import ModelConfig

config = ModelConfig(
    architecture="transformer_encoder",
    vocab_size=5000,
    hidden_dim=512,
    num_layers=12,
    num_heads=8,
)

model = get_model(config.architecture, config)
print(type(model).__name__)  # TransformerEncoder

# Works with any registered model
config.architecture = "autoregressive_transformer"
model = get_model(config.architecture, config)
print(type(model).__name__)  # AutoregressiveTransformer
