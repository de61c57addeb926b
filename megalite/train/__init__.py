"""Building, stepping, looping, launching: from a configuration to a trained model."""
