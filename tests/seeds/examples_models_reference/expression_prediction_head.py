from scforge.models.components import ExpressionPredictionHead
import torch

head = ExpressionPredictionHead(hidden_dim=512)

hidden_states = torch.randn(16, 300, 512)
predicted_values = head(hidden_states)
print(predicted_values.shape)  # (16, 300)

# Compute MSE loss at masked positions
target_values = torch.randn(16, 300)
masked_positions = torch.rand(16, 300) < 0.15

loss = torch.nn.functional.mse_loss(
    predicted_values[masked_positions],
    target_values[masked_positions],
)
