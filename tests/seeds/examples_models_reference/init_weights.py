from scforge.models import init_weights
import torch.nn as nn

class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5000, 512)
        self.linear = nn.Linear(512, 512)
        self.layer_norm = nn.LayerNorm(512)

    def forward(self, x):
        return self.layer_norm(self.linear(self.embedding(x)))

model = MyModel()
model.apply(init_weights)

# Check initialization
print(model.embedding.weight.mean())  # ~0.0
print(model.embedding.weight.std())   # ~0.02
print(model.linear.bias.abs().max())  # 0.0
