from scforge.models.components import BinPredictionHead
import torch

head = BinPredictionHead(hidden_dim=512, n_bins=51)

hidden_states = torch.randn(8, 200, 512)
bin_logits = head(hidden_states)
print(bin_logits.shape)  # (8, 200, 51)

# Compute loss
bin_labels = torch.randint(0, 51, (8, 200))
loss_fn = torch.nn.CrossEntropyLoss()
loss = loss_fn(bin_logits.view(-1, 51), bin_labels.view(-1))
