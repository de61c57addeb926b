"""What Hugging Face calls things: the machinery by which an architecture's file says it, once for both directions."""
