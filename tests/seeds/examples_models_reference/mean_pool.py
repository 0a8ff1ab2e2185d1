from scforge.models.components import mean_pool
import torch

hidden_states = torch.randn(8, 256, 512)
attention_mask = torch.ones(8, 256)
attention_mask[:, 200:] = 0  # Last 56 positions are padding

cell_embeddings = mean_pool(hidden_states, attention_mask)
print(cell_embeddings.shape)  # (8, 512)

# Without mask (all positions included)
cell_embeddings = mean_pool(hidden_states)
print(cell_embeddings.shape)  # (8, 512)
