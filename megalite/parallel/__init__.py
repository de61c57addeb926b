"""One module for each way of cutting the work, and what a parameter is in the global model."""
