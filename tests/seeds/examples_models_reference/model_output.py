import torch
from scforge.models import TransformerEncoder, ModelOutput

model = TransformerEncoder(vocab_size=5000, hidden_dim=512, num_layers=6, num_heads=8)

# Training mode (with labels)
input_ids = torch.randint(0, 5000, (4, 128))
attention_mask = torch.ones(4, 128)
labels = torch.randint(0, 5000, (4, 128))

output: ModelOutput = model(input_ids, attention_mask, labels=labels)
print(output.loss)        # Scalar tensor
print(output.logits.shape)  # (4, 128, 5000)
print(output.embeddings.shape)  # (4, 512)

# Inference mode (no labels)
output = model(input_ids, attention_mask)
print(output.loss)  # None
