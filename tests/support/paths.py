"""Where things lie that tests read."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "engine" / "hub" / "demo_model"
MODEL_CONFIGS = ROOT / "configs" / "models"
# Real trained weights with golden outputs, beside the checkout; tests skip where they are absent.
STORIES = ROOT.parent / "shared" / "models" / "stories260K"
