from scforge.models.components import MaskedGenePredictionHead
import torch

head = MaskedGenePredictionHead(hidden_dim=512, vocab_size=5000)

hidden_states = torch.randn(4, 128, 512)
logits = head(hidden_states)
print(logits.shape)  # (4, 128, 5000)

# Compute cross-entropy loss for masked positions
labels = torch.randint(0, 5000, (4, 128))
labels[labels < 2500] = -100  # ignore unmasked positions

loss_fn = torch.nn.CrossEntropyLoss(ignore_index=-100)
loss = loss_fn(logits.view(-1, 5000), labels.view(-1))
