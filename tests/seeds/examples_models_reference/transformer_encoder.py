from scforge.models import TransformerEncoder
from scforge.config.schema import ModelConfig
import torch

# Create from config (recommended)
config = ModelConfig(
    architecture="transformer_encoder",
    vocab_size=5000,
    hidden_dim=512,
    num_layers=12,
    num_heads=8,
    dropout=0.1,
    pooling="mean",
)
model = TransformerEncoder.from_config(config)

# Or instantiate directly
model = TransformerEncoder(
    vocab_size=5000,
    hidden_dim=512,
    num_layers=12,
    num_heads=8,
    pooling="mean",
)

print(f"Model has {model.num_parameters():,} parameters")
# Model has 45,234,560 parameters

# Training forward pass
batch = {
    "input_ids": torch.randint(0, 5000, (16, 256)),
    "attention_mask": torch.ones(16, 256),
    "values": torch.randn(16, 256),
    "labels": torch.randint(0, 5000, (16, 256)),
}

output = model(
    input_ids=batch["input_ids"],
    attention_mask=batch["attention_mask"],
    values=batch["values"],
    labels=batch["labels"],
)

loss = output.loss  # Scalar tensor
loss.backward()

# Inference - extract cell embeddings
embeddings = model.encode(
    input_ids=batch["input_ids"],
    attention_mask=batch["attention_mask"],
    values=batch["values"],
)
print(embeddings.shape)  # (16, 512)
