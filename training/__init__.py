"""What section 5 of the paper needs beyond transformers' trainers and Accelerate."""
