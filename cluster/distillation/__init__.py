"""Makes a draft for any target from the target's own answers: sample, train, evaluate, export.

Knows neither Serve nor where models come from: loaded models and tokenizers are passed in.
"""
