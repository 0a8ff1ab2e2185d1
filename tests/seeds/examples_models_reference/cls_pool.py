from scforge.models.components import cls_pool
import torch

hidden_states = torch.randn(8, 256, 512)
cell_embeddings = cls_pool(hidden_states)
print(cell_embeddings.shape)  # (8, 512)
