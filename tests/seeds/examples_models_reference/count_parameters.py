from scforge.models import TransformerEncoder, count_parameters

model = TransformerEncoder(
    vocab_size=5000,
    hidden_dim=512,
    num_layers=12,
    num_heads=8,
)

total = count_parameters(model, trainable_only=False)
trainable = count_parameters(model, trainable_only=True)

print(f"Total parameters: {total:,}")
print(f"Trainable parameters: {trainable:,}")

# Freeze some layers
for param in model.embedding.parameters():
    param.requires_grad = False

trainable = count_parameters(model, trainable_only=True)
print(f"Trainable after freezing embedding: {trainable:,}")
