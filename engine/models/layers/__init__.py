"""Linear layers in torch, by weight format. It knows no model."""
