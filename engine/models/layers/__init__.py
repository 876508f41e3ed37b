"""What models are made of, in torch: linear layers, rotary positions. It knows no model."""
