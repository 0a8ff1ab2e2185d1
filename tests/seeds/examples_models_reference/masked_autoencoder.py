from scforge.models import MaskedAutoencoder
from scforge.config.schema import ModelConfig
import torch

# Create asymmetric encoder-decoder
config = ModelConfig(
    architecture="masked_autoencoder",
    vocab_size=5000,
    hidden_dim=768,  # encoder_dim
    decoder_dim=384,  # half of encoder_dim
    num_layers=12,   # encoder_layers
    decoder_layers=4,
    num_heads=12,    # encoder_heads
    pooling="mean",
)
model = MaskedAutoencoder.from_config(config)

print(f"Encoder dim: {model.encoder_dim}, Decoder dim: {model.decoder_dim}")
# Encoder dim: 768, Decoder dim: 384

# Training with masked positions
batch_size, seq_len = 16, 300
batch = {
    "input_ids": torch.randint(0, 5000, (batch_size, seq_len)),
    "attention_mask": torch.ones(batch_size, seq_len),
    "values": torch.randn(batch_size, seq_len),
    "labels": torch.full((batch_size, seq_len), -100),  # trigger training mode
    "masked_positions": torch.rand(batch_size, seq_len) < 0.15,  # 15% masking
}

output = model(
    input_ids=batch["input_ids"],
    attention_mask=batch["attention_mask"],
    values=batch["values"],
    labels=batch["labels"],
    masked_positions=batch["masked_positions"],
)

print(output.loss)  # MSE loss at masked positions only
print(output.logits.shape)  # (16, 300) - predicted expression values

# Inference - extract embeddings
embeddings = model.encode(
    input_ids=batch["input_ids"],
    attention_mask=batch["attention_mask"],
    values=batch["values"],
)
print(embeddings.shape)  # (16, 768)
