"""One page that compares models: their scores, training curves, pictures, settings and speeds."""
