from scforge.models import AutoregressiveTransformer
from scforge.config.schema import ModelConfig
import torch

# Create from config
config = ModelConfig(
    architecture="autoregressive_transformer",
    vocab_size=5000,
    n_bins=51,
    hidden_dim=512,
    num_layers=12,
    num_heads=8,
    gene_loss_weight=1.0,
    expression_loss_weight=0.5,
)
model = AutoregressiveTransformer.from_config(config)

# Training with dual heads
batch = {
    "input_ids": torch.randint(0, 5000, (8, 200)),
    "attention_mask": torch.ones(8, 200),
    "values": torch.randn(8, 200),
    "labels": torch.randint(0, 5000, (8, 200)),
    "bin_ids": torch.randint(0, 51, (8, 200)),
}

output = model(
    input_ids=batch["input_ids"],
    attention_mask=batch["attention_mask"],
    values=batch["values"],
    labels=batch["labels"],
    bin_ids=batch["bin_ids"],
)

print(output.loss)  # Combined loss: 1.0 * gene_loss + 0.5 * bin_loss
print(output.logits.shape)  # (8, 200, 5000) - gene predictions

# Inference - extract embeddings (no causal mask)
embeddings = model.encode(
    input_ids=batch["input_ids"],
    attention_mask=batch["attention_mask"],
    values=batch["values"],
)
print(embeddings.shape)  # (8, 512)
