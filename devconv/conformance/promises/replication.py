"""Replicas on several devices compute as one model, and train it."""
