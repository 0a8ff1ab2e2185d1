from scforge.models.components import GeneExpressionEmbedding
import torch

embedding = GeneExpressionEmbedding(
    vocab_size=5000,
    hidden_dim=512,
    max_seq_len=2048,
    use_expression_values=True,
)

input_ids = torch.randint(0, 5000, (8, 256))
values = torch.randn(8, 256)

# With expression values
emb = embedding(input_ids, values=values)
print(emb.shape)  # (8, 256, 512)

# Without expression values (uses zeros)
emb = embedding(input_ids)
print(emb.shape)  # (8, 256, 512)
