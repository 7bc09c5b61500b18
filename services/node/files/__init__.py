"""Weight files as far as their headers tell: what a model is and what it weighs. Without torch."""
