"""Generation of text by trained models, and their evaluation."""
