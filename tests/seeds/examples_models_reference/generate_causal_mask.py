from scforge.models.components import generate_causal_mask
import torch

# Generate causal mask for sequence length 5
mask = generate_causal_mask(5)
print(mask)
# tensor([[ 0., -inf, -inf, -inf, -inf],
#         [ 0.,  0., -inf, -inf, -inf],
#         [ 0.,  0.,  0., -inf, -inf],
#         [ 0.,  0.,  0.,  0., -inf],
#         [ 0.,  0.,  0.,  0.,  0.]])

# Use in autoregressive model
seq_len = 200
input_ids = torch.randint(0, 5000, (8, seq_len))
causal_mask = generate_causal_mask(seq_len, device=input_ids.device)

# Pass to nn.TransformerEncoder
# encoder(embeddings, mask=causal_mask, src_key_padding_mask=padding_mask)
