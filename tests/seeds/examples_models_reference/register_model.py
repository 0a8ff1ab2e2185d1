from scforge.models import register_model
import torch.nn as nn

@register_model("my_custom_model")
class MyCustomModel(nn.Module):
    def __init__(self, vocab_size, hidden_dim):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, hidden_dim)

    @classmethod
    def from_config(cls, config):
        return cls(vocab_size=config.vocab_size, hidden_dim=config.hidden_dim)

    def forward(self, input_ids, attention_mask, **kwargs):
        # ... model logic ...
        pass

# Now available via registry
from scforge.models import get_model, list_models

print(list_models())
# ['autoregressive_transformer', 'masked_autoencoder', 'my_custom_model', 'transformer_encoder']
